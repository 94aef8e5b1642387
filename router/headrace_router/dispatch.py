"""One token of one request on its way from a Step to the request's stream."""

from __future__ import annotations

import math
import time

from headrace._common.errors import GenerationFailed
from headrace.v1 import generation_pb2 as pb
from headrace_router.entry import Entry
from headrace_router.types import FinishReason, PromptToken, Token, TopToken

REASONS: dict[int, FinishReason] = {
    pb.Detail.LENGTH: "length", pb.Detail.EOS_TOKEN: "eos_token", pb.Detail.STOP_TOKEN: "stop_sequence",
}


def read_top(detail: pb.Detail, row: int) -> list[TopToken] | None:
    """The most likely tokens of the request's `row`th token in this step, if it asked for them."""
    if row >= len(detail.top):
        return None
    top = detail.top[row]
    return [TopToken(i, p) for i, p in zip(top.token_id, top.logprob, strict=True)]


def _read_prompt(detail: pb.Detail) -> list[PromptToken] | None:
    if not detail.HasField("prompt_logprobs"):
        return None
    rows = zip(detail.prompt_logprobs.token_id, detail.prompt_logprobs.logprob, strict=True)
    return [PromptToken(i, None if math.isnan(p) else p) for i, p in rows]


def _token(
    entry: Entry, token_id: int, logprob: float, text: str, special: bool, top: list[TopToken] | None,
    detail: pb.Detail | None,
) -> Token:
    token = Token(token_id, logprob, text, special, top)
    if detail is not None:
        token.prompt = _read_prompt(detail)
        if len(entry.output) == 1:
            entry.cached_tokens = detail.cached_tokens
    return token


def send_token(
    entry: Entry, token_id: int, logprob: float, special: bool, top: list[TopToken] | None, detail: pb.Detail | None
) -> bool:
    """Send a token that is not the last one for the shard; True if a stop string ends the request with it."""
    entry.output.append(token_id)
    token = _token(entry, token_id, logprob, entry.text.push(token_id), special, top, detail)
    if entry.request.stop and entry.text.stopped:
        token.end = entry.end("stop_sequence", time.perf_counter())
    entry.stream.put(token)
    return token.end is not None


def send_last(
    entry: Entry, token_id: int, logprob: float, special: bool, top: list[TopToken] | None, detail: pb.Detail
) -> None:
    """Send the last token of a request, or its error. An end token is special whatever the tokenizer calls it."""
    if detail.finish_reason == pb.Detail.ERROR:
        entry.stream.fail(GenerationFailed(detail.message or "the shard ended the request with an error"))
        return
    reason = REASONS.get(detail.finish_reason)
    if reason is None:
        entry.stream.fail(GenerationFailed("the shard gave no reason for the end of the request"))
        return
    entry.output.append(token_id)
    at_end_token = reason == "eos_token"
    text = "" if at_end_token else entry.text.push(token_id)
    text += entry.text.finish()
    if entry.text.stopped:
        reason = "stop_sequence"
    token = _token(entry, token_id, logprob, text, special or at_end_token, top, detail)
    token.end = entry.end(reason, time.perf_counter())
    entry.stream.put(token)
