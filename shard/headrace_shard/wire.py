"""Between the messages of generation.proto and the shard's own types."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np

from headrace._common.detokenizer import Detokenizer
from headrace._common.errors import InvalidRequest
from headrace._common.grammars import GrammarError, read
from headrace._common.tokenizing import Tokenizer
from headrace.v1 import generation_pb2 as pb
from headrace_shard import requests as rq
from headrace_shard.grammar.compiler import GrammarCompiler
from headrace_shard.grammar.state import Constraint
from headrace_shard.sampling.params import SamplingParams, Watermark


@dataclass(frozen=True)
class RequestLimits:
    """What a request may ask for."""

    max_input_tokens: int
    max_total_tokens: int
    vocab_size: int


class RequestReader:
    """Validates request messages."""

    def __init__(
        self, limits: RequestLimits, tokenizer: Tokenizer, watermark: Watermark | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`watermark`: what requests get that ask for one. `grammars`: None where output cannot be constrained."""
        self._limits, self._tokenizer = limits, tokenizer
        self._watermark, self._grammars = watermark or Watermark(), grammars

    def read(self, message: pb.Request) -> rq.Request:
        """The request; text is tokenized here, so call it from a thread.

        Raises:
            InvalidRequest: names the request, the field, the value and the limit.
        """
        try:
            return self._read(message)
        except InvalidRequest as error:
            raise InvalidRequest(f"request {message.id}: {error}", error.field) from None

    def _read(self, message: pb.Request) -> rq.Request:
        if not message.id:
            raise InvalidRequest("id is 0", "id")
        if message.adapter:
            raise InvalidRequest(f"adapter {message.adapter!r} is not loaded", "adapter")
        tokens = self._tokens(message)
        generated = message.generated
        if generated >= len(tokens):
            raise InvalidRequest(f"generated {generated} must be less than the {len(tokens)} token ids", "generated")
        prompt, limits = len(tokens) - generated, self._limits
        if prompt > limits.max_input_tokens:
            raise InvalidRequest(f"input has {prompt} tokens, the limit is {limits.max_input_tokens}", "input")
        stopping = message.stopping
        max_new = self._max_new(stopping, prompt, generated)
        return rq.Request(
            id=message.id, tokens=tokens, generated=generated, max_new=max_new, params=self._sampling(message.sampling),
            min_new=stopping.min_new_tokens, priority=message.priority, ignore_eos=stopping.ignore_eos,
            stop_ids=frozenset(self._checked(stopping.stop_token_ids, "stop_token_ids").tolist()),
            cache_salt=message.cache_salt, top_n=self._top_n("top_n_tokens", message.want.top_n_tokens),
            prompt_logprobs=message.want.prompt_logprobs,
            prompt_top_n=self._top_n("prompt_top_n_tokens", message.want.prompt_top_n_tokens),
            detokenizer=self._detokenizer(tokens[prompt:].tolist()) if message.return_text else None,
            constraint=self._constraint(message, tokens[prompt:].tolist(), max_new) if message.HasField("grammar") else None,
        )

    def _constraint(self, message: pb.Request, output: list[int], max_new: int) -> Constraint:
        if self._grammars is None:
            raise InvalidRequest("grammar is not supported: this model's tokens cannot be constrained", "grammar")
        try:
            grammar = read(message.grammar.type, message.grammar.value)
            return self._grammars.start(grammar, output, last=max_new - len(output) == 1)
        except GrammarError as error:
            raise InvalidRequest(f"grammar is not valid: {error}", "grammar") from None

    def _tokens(self, message: pb.Request) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        if message.WhichOneof("input") == "token_ids":
            tokens = self._checked(message.token_ids.ids, "token_ids")
        else:
            least = self._tokenizer.least_tokens(message.text)
            if least > self._limits.max_input_tokens:
                raise InvalidRequest(
                    f"input has at least {least} tokens, the limit is {self._limits.max_input_tokens}", "text"
                )
            tokens = self._checked(self._tokenizer.encode(message.text), "text")
        if not len(tokens):
            raise InvalidRequest("input is empty", "input")
        return tokens

    def _checked(self, ids: object, field: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        array = np.array(ids, dtype=np.int64)
        if len(array) and int(array.max()) >= self._limits.vocab_size:
            raise InvalidRequest(f"{field} holds {array.max()}, the vocabulary has {self._limits.vocab_size}", field)
        return array.astype(np.int32)

    def _max_new(self, stopping: pb.Stopping, prompt: int, generated: int) -> int:
        room = self._limits.max_total_tokens - prompt
        if room < 1:
            raise InvalidRequest(f"input has {prompt} tokens, which fills the window of {self._limits.max_total_tokens}")
        max_new = stopping.max_new_tokens if stopping.HasField("max_new_tokens") else room
        if not max_new:
            raise InvalidRequest("max_new_tokens is 0; it must be at least 1", "max_new_tokens")
        if max_new > room:
            raise InvalidRequest(
                f"{prompt} input tokens and max_new_tokens {max_new} are more than the limit of "
                f"{self._limits.max_total_tokens}", "max_new_tokens",
            )
        if generated >= max_new:
            raise InvalidRequest(f"generated {generated} must be less than max_new_tokens {max_new}", "generated")
        if stopping.min_new_tokens > max_new:
            raise InvalidRequest(
                f"min_new_tokens {stopping.min_new_tokens} is more than max_new_tokens {max_new}", "min_new_tokens"
            )
        return max_new

    def _top_n(self, field: str, value: int) -> int:
        if value > self._limits.vocab_size:
            raise InvalidRequest(f"{field} {value} is more than the vocabulary's {self._limits.vocab_size}", field)
        return value

    def _sampling(self, s: pb.Sampling) -> SamplingParams:
        def number(field: str, default: float, low: float, high: float, above: bool = False) -> float:
            value = getattr(s, field) if s.HasField(field) else default
            if not math.isfinite(value) or value > high or value < low or (above and value <= low):
                bounds = f"{'above' if above else 'from'} {low} to {high}"
                raise InvalidRequest(f"{field} is {value}; it must be {bounds}", field)
            return float(value)

        if s.HasField("top_k") and not s.top_k:
            raise InvalidRequest("top_k is 0; it must be at least 1", "top_k")
        for token, bias in s.logit_bias.items():
            if token >= self._limits.vocab_size:
                limit = self._limits.vocab_size
                raise InvalidRequest(f"logit_bias names {token}, the vocabulary has {limit}", "logit_bias")
            if not -100 <= bias <= 100:
                raise InvalidRequest(f"logit_bias of {token} is {bias}; it must be from -100 to 100", "logit_bias")
        implied = any(s.HasField(f) for f in ("temperature", "top_k", "top_p", "typical_p", "min_p"))
        sampled = s.do_sample if s.HasField("do_sample") else implied
        seed = s.seed if s.HasField("seed") else secrets.randbits(64)
        return SamplingParams(
            watermark=self._watermark if s.watermark else None,
            repetition_penalty=number("repetition_penalty", 1.0, 0.0, 1e6, above=True),
            frequency_penalty=number("frequency_penalty", 0.0, -2.0, 2.0),
            presence_penalty=number("presence_penalty", 0.0, -2.0, 2.0),
            logit_bias=dict(s.logit_bias), sampled=sampled,
            temperature=number("temperature", 1.0, 0.0, 1e6, above=True),
            top_k=s.top_k if s.HasField("top_k") else 0, top_p=number("top_p", 1.0, 0.0, 1.0, above=True),
            typical_p=number("typical_p", 1.0, 0.0, 1.0, above=True), min_p=number("min_p", 0.0, 0.0, 1.0), seed=seed,
        )

    def _detokenizer(self, output: list[int]) -> Detokenizer:
        detokenizer = Detokenizer(self._tokenizer.bytes_of, self._tokenizer.special_ids)
        for token in output:
            detokenizer.push(token)
        return detokenizer


def step_message(result: rq.StepResult) -> pb.Step:
    """The message of one step. Text is decoded here, in the order of the steps."""
    timings = result.timings
    message = pb.Step(
        batch_id=result.batch_id, step=result.step, preempted=result.preempted, running=result.running,
        cache=pb.Cache(
            blocks=result.blocks, free_blocks=result.free_blocks, queried_tokens=result.queried_tokens,
            hit_tokens=result.hit_tokens,
        ),
        end=result.end,  # type: ignore[arg-type]
        timings=pb.Timings(
            forward_us=int(timings.forward * 1e6), sample_us=int(timings.sample * 1e6),
            total_us=int(timings.total * 1e6),
            decode_tokens=timings.decode_tokens, prefill_tokens=timings.prefill_tokens,
            draft_tokens=timings.draft_tokens, accepted_tokens=timings.accepted_tokens, draft_us=int(timings.draft * 1e6),
            model_draft_tokens=timings.model_draft_tokens, model_accepted_tokens=timings.model_accepted_tokens,
        ),
    )
    message.intermediates.request_id.extend(result.request_ids)
    message.intermediates.token_id.extend(result.token_ids)
    message.intermediates.logprob.extend(result.logprobs)
    for detail in result.details:
        _add_detail(message, detail)
    return message


def _add_detail(step: pb.Step, detail: rq.Detail) -> None:
    message = step.details.add(
        request_id=detail.request_id, is_end=detail.finish_reason != rq.UNFINISHED,
        finish_reason=detail.finish_reason, message=detail.message, seed=detail.seed,
        prompt_tokens=detail.prompt_tokens, generated_tokens=detail.generated_tokens,
        cached_tokens=detail.cached_tokens, draft_tokens=detail.draft_tokens, accepted_tokens=detail.accepted_tokens,
    )
    if detail.detokenizer:
        text = "".join(detail.detokenizer.push(token) for token in detail.tokens)
        message.text = text + (detail.detokenizer.flush() if message.is_end else "")
    for ids, logprobs in detail.top:
        message.top.add(token_id=ids, logprob=logprobs)
    if detail.prompt_logprobs:
        message.prompt_logprobs.token_id.extend(detail.prompt_logprobs[0])
        message.prompt_logprobs.logprob.extend(detail.prompt_logprobs[1])
        for ids, logprobs in detail.prompt_top:
            message.prompt_logprobs.top.add(token_id=ids, logprob=logprobs)
