"""The two APIs in which a server is asked for text, and the features that each server's form of them carries.

TGI's `/generate_stream` (https://huggingface.github.io/text-generation-inference/) and OpenAI's `/v1/completions`
(https://platform.openai.com/docs/api-reference/completions) with the parameters that servers have added to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace._common.errors import GenerationFailed
from headrace_router.network.frames import JobFrame
from headrace_router.types import End, FinishReason, Token, TopToken

UNKNOWN = -1  # the id of a token whose server tells none
_FINISHES: dict[str, FinishReason] = {
    "eos_token": "eos_token", "stop": "eos_token", "stop_sequence": "stop_sequence", "length": "length"
}


class Api(Protocol):
    """How a server is asked, and what its events mean."""

    @property
    def path(self) -> str:
        """Of its route."""
        ...

    @property
    def features(self) -> frozenset[str]:
        """What requests may need: see `text_output.needs`."""
        ...

    def body(self, job: JobFrame) -> dict[str, Any]:
        """The request of a job."""
        ...

    def read(self, event: dict[str, Any]) -> list[Token]:
        """The tokens of an event; the last one of a stream has the end.

        Raises:
            GenerationFailed: the event tells an error.
            KeyError, TypeError, ValueError, AttributeError: it is none of this API.
        """
        ...


def end_of(reason: str) -> End:
    """
    Raises:
        GenerationFailed: the output was cut for a reason that no client would expect.
    """
    if reason not in _FINISHES:
        raise GenerationFailed(f"the upstream ended its output with {reason[:40]!r}")
    return End(_FINISHES[reason], "", 0, 0, None, 0, 0.0, 0.0)


def _failed(error: Any) -> GenerationFailed:
    text = error.get("message") if isinstance(error, dict) else error
    return GenerationFailed(f"the upstream failed: {str(text)[:300]}")


def _set(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Tgi:
    """TGI and Headrace: ids and log probabilities come with every token."""

    path: str = "/generate_stream"
    features: frozenset[str] = frozenset({
        "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "watermark", "top_n_tokens",
        "shown_tokens", "grammar.json_schema", "grammar.regex",
    })

    def body(self, job: JobFrame) -> dict[str, Any]:
        given = job.params
        parameters = _set(
            max_new_tokens=given.max_new_tokens, do_sample=given.do_sample, seed=job.seed, temperature=given.temperature,
            top_k=given.top_k, top_p=given.top_p, typical_p=given.typical_p, repetition_penalty=given.repetition_penalty,
            frequency_penalty=given.frequency_penalty, watermark=given.watermark or None,
            top_n_tokens=job.want.top_n or None,
        )
        if given.grammar is not None:
            kind, source = given.grammar
            grammar = {"type": "regex", "value": source} if kind == "regex" else {"type": "json", "value": json.loads(source)}
            parameters["grammar"] = grammar
        return {"inputs": job.text, "parameters": {**parameters, "details": True}}

    def read(self, event: dict[str, Any]) -> list[Token]:
        if "error" in event:
            raise _failed(event["error"])
        told = event["token"]
        token = Token(told["id"], _known(told["logprob"]), "" if told["special"] else told["text"], told["special"])
        if tops := event.get("top_tokens"):
            token.top = [TopToken(top["id"], top["logprob"]) for top in tops]
        if details := event.get("details"):
            token.end = end_of(details["finish_reason"])
        return [token]


@dataclass(frozen=True)
class OpenAI:
    """`/v1/completions`. `names`: what this server calls parameters beyond OpenAI's; `extra`: what it is told unless a job says
    otherwise, such as that nothing is cut off, where it would do so by default.
    """

    model: str
    names: Mapping[str, str] = field(default_factory=dict)
    grammars: frozenset[str] = frozenset()  # kinds
    schema: str = "response_format"  # where a JSON schema goes
    extra: Mapping[str, Any] = field(default_factory=dict)
    path: str = "/v1/completions"

    @property
    def features(self) -> frozenset[str]:
        own = {"temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias"}
        return frozenset(own | self.names.keys() | {f"grammar.{kind}" for kind in self.grammars})

    def body(self, job: JobFrame) -> dict[str, Any]:
        given = job.params
        temperature = (1.0 if given.temperature is None else given.temperature) if given.do_sample else 0.0
        values = {
            "top_k": given.top_k, "min_p": given.min_p, "typical_p": given.typical_p,
            "repetition_penalty": given.repetition_penalty, "min_tokens": given.min_new_tokens or None,
            "ignore_eos": given.ignore_eos or None,
        }
        body = _set(
            model=self.model, prompt=job.text, max_tokens=given.max_new_tokens, stream=True, temperature=temperature,
            top_p=given.top_p, frequency_penalty=given.frequency_penalty, presence_penalty=given.presence_penalty,
            logit_bias={str(token): bias for token, bias in given.logit_bias} or None,
            seed=None if job.seed is None else job.seed % 2**31,  # 32 bits in some servers
            **{self.names[name]: value for name, value in values.items() if name in self.names},
        )
        if given.grammar is not None:
            schema = json.loads(given.grammar[1])
            wrapped = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
            body[self.schema] = wrapped if self.schema == "response_format" else schema
        return {**self.extra, **body}

    def read(self, event: dict[str, Any]) -> list[Token]:
        if "error" in event:
            raise _failed(event["error"])
        if not event["choices"]:
            return []  # usage
        choice = event["choices"][0]
        tokens = _tokens(choice.get("text") or "", choice.get("token_ids"), choice.get("logprobs") or {})
        if (reason := choice.get("finish_reason")) is not None:
            tokens = tokens or [Token(UNKNOWN, math.nan, "", False)]
            tokens[-1].end = end_of(reason)
        return tokens


def _tokens(text: str, ids: list[int] | None, logprobs: dict[str, Any]) -> list[Token]:
    """A chunk of a completion as tokens: as many as are told one by one, else one for all of its text."""
    if (content := logprobs.get("content")) is not None:  # llama.cpp's form
        texts, values = [entry["token"] for entry in content], [entry["logprob"] for entry in content]
        if "".join(texts) != text:  # the last token alone, of several that share a character
            texts, values = [], []
        elif all("id" in entry for entry in content):
            ids = [entry["id"] for entry in content]
    else:
        texts, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    if ids is not None:
        values = values if len(values) == len(ids) else [math.nan] * len(ids)
        texts = texts if len(texts) == len(ids) and "".join(texts) == text else [text, *[""] * (len(ids) - 1)]
        return [Token(i, _known(value), part, False) for i, value, part in zip(ids, values, texts, strict=False)]
    if len(texts) == len(values) and "".join(texts) == text:
        return [Token(UNKNOWN, _known(value), part, False) for value, part in zip(values, texts, strict=True)]
    return [Token(UNKNOWN, math.nan, text, False)] if text else []


def _known(logprob: float | None) -> float:
    return math.nan if logprob is None else logprob
