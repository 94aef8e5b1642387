"""One token of one request on its way from a Step to the request's stream."""

from __future__ import annotations

import math
import time
from collections import Counter

from headrace._common.errors import GenerationFailed
from headrace.v1 import generation_pb2 as pb
from headrace_router.entry import Entry
from headrace_router.types import FinishReason, PromptToken, Token, TopToken

REASONS: dict[int, FinishReason] = {
    pb.Detail.LENGTH: "length", pb.Detail.EOS_TOKEN: "eos_token", pb.Detail.STOP_TOKEN: "stop_sequence",
}


class TokenDetail:
    """What a Detail says of one of its request's tokens in the step."""

    __slots__ = ("detail", "is_last", "row")

    def __init__(self, detail: pb.Detail, row: int, is_last: bool) -> None:
        self.detail, self.row, self.is_last = detail, row, is_last

    @property
    def top(self) -> list[TopToken] | None:
        """The most likely tokens, if the request asked for them."""
        if self.row >= len(self.detail.top):
            return None
        return _top_tokens(self.detail.top[self.row])

    @property
    def prompt(self) -> list[PromptToken] | None:
        """The prompt's tokens; only with the first token of a request that asked for them."""
        if not self.detail.HasField("prompt_logprobs"):
            return None
        given = self.detail.prompt_logprobs
        rows = zip(given.token_id, given.logprob, strict=True)
        tokens = [PromptToken(i, None if math.isnan(p) else p) for i, p in rows]
        for token, top in zip(tokens, given.top, strict=False):  # there are none unless asked for
            token.top = _top_tokens(top)
        return tokens


def _top_tokens(top: pb.TopTokens) -> list[TopToken]:
    return [TopToken(i, p) for i, p in zip(top.token_id, top.logprob, strict=True)]


class StepDetails:
    """The details of a step, dealt out to the tokens that they are about: a request may have several in one step."""

    def __init__(self, step: pb.Step) -> None:
        self._details = {detail.request_id: detail for detail in step.details}
        self._rows = dict.fromkeys(self._details, 0)
        self._left = Counter(i for i in step.intermediates.request_id if i in self._details)

    def next(self, request_id: int) -> TokenDetail | None:
        """For the request's next token in the step."""
        detail = self._details.get(request_id)
        if detail is None:
            return None
        row = self._rows[request_id]
        self._rows[request_id] += 1
        return TokenDetail(detail, row, detail.is_end and row + 1 == self._left[request_id])


def send_token(entry: Entry, token_id: int, logprob: float, special: bool, detail: TokenDetail | None) -> bool:
    """Send a token that is not the last one for the shard; True if a stop string ends the request with it."""
    entry.output.append(token_id)
    token = Token(token_id, logprob, entry.text.push(token_id), special)
    if detail is not None:
        _add_detail(entry, token, detail)
    if entry.request.stop and entry.text.stopped:
        token.end = entry.end("stop_sequence", time.perf_counter())
    entry.stream.put(token)
    return token.end is not None


def send_last(entry: Entry, token_id: int, logprob: float, special: bool, last: TokenDetail) -> None:
    """Send the last token of a request, or its error. An end token is special whatever the tokenizer calls it."""
    detail = last.detail
    if detail.finish_reason == pb.Detail.ERROR:
        entry.stream.fail(GenerationFailed(detail.message or "the shard ended the request with an error"))
        return
    reason = REASONS.get(detail.finish_reason)
    if reason is None:
        entry.stream.fail(GenerationFailed("the shard gave no reason for the end of the request"))
        return
    entry.output.append(token_id)
    at_end_token = reason == "eos_token" or (detail.finish_reason == pb.Detail.STOP_TOKEN and not entry.request.keep_stop)
    text = "" if at_end_token else entry.text.push(token_id)
    text += entry.text.finish()
    if entry.text.stopped:
        reason = "stop_sequence"
    token = Token(token_id, logprob, text, special or at_end_token)
    _add_detail(entry, token, last)
    entry.draft_tokens, entry.accepted_tokens = detail.draft_tokens, detail.accepted_tokens
    token.end = entry.end(reason, time.perf_counter())
    entry.stream.put(token)


def _add_detail(entry: Entry, token: Token, detail: TokenDetail) -> None:
    token.top, token.prompt = detail.top, detail.prompt
    if len(entry.output) == 1:
        entry.cached_tokens = entry.stream.cached_tokens = detail.detail.cached_tokens
