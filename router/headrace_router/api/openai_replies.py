"""Tokens into OpenAI's answers and chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import headrace
from headrace._common.errors import HeadraceError
from headrace_router import sse
from headrace_router.api import openai_types as shapes
from headrace_router.api.choices import end_of, ranked
from headrace_router.api.errors import openai_event
from headrace_router.api.openai_requests import Prepared
from headrace_router.service import Service
from headrace_router.types import End, FinishReason, Token

REASONS: dict[FinishReason, shapes.FinishReason] = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


def usage(prepared: Prepared, ends: Sequence[End]) -> shapes.Usage:
    """Token counts of a call. A prompt counts once, and every token that was made for it."""
    first = ends[:: prepared.best_of]
    prompt, cached = sum(end.input_length for end in first), sum(end.cached_tokens for end in first)
    completion = sum(end.generated_tokens for end in ends) if prepared.shown.output else 0
    made = shapes.Usage(prompt, completion, prompt + completion, shapes.PromptDetails(cached))
    guessed, right = sum(end.draft_tokens for end in ends), sum(end.accepted_tokens for end in ends)
    if guessed:
        made.completion_tokens_details = shapes.CompletionDetails(
            accepted_prediction_tokens=right, rejected_prediction_tokens=guessed - right
        )
    return made


def is_end_token(token: Token) -> bool:
    """A token that ended the text and is no part of it."""
    return token.end is not None and token.end.finish_reason == "eos_token"


class Replies(ABC):
    """One id and one time for a whole call."""

    prefix: ClassVar[str]
    reply: ClassVar[type[shapes.ChatReply | shapes.CompletionReply]]
    chunk: ClassVar[type[shapes.ChatChunk | shapes.CompletionChunk]]

    def __init__(self, service: Service, prepared: Prepared) -> None:
        self.prepared, self.shown = prepared, prepared.shown
        self.tokenizer = service.text.tokenizer
        self._envelope: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.model_name,
            "system_fingerprint": f"headrace-{headrace.__version__}",
        }
        if self.shown.service_tier is not None:
            self._envelope["service_tier"] = self.shown.service_tier
        self._of_text: dict[int, sse.FrameOfText] = {}  # by choice
        self._no_usage: dict[str, Any] = {"usage": None} if self.shown.include_usage else {}

    def frame(self, choice: Any, **more: Any) -> bytes:
        """A chunk with one choice."""
        return sse.frame(self._data(choice, **more))

    def _data(self, choice: Any, **more: Any) -> bytes:
        return shapes.encode(self.chunk(choices=[choice], **self._envelope, **self._no_usage, **more))

    def text_frame(self, index: int, text: str, choice: Callable[[str], Any]) -> bytes:
        """A chunk that differs from others of its choice in its text alone; `choice` makes it of a text."""
        made = self._of_text.get(index)
        if made is None:
            made = self._of_text[index] = sse.FrameOfText(lambda text: self._data(choice(text)))
        return made(text)

    def last_frames(self, ends: list[End]) -> bytes:
        """The end of a stream, with an extra chunk if it asked for usage. `ends`: by request."""
        if not self.shown.include_usage:
            return sse.DONE
        return sse.frame(shapes.encode(self.chunk(choices=[], **self._envelope, usage=self.usage(ends)))) + sse.DONE

    def error_frames(self, error: HeadraceError) -> bytes:
        """The end of a stream that fails."""
        return openai_event(error)

    def usage(self, ends: Sequence[End]) -> shapes.Usage:
        """Token counts of the call."""
        return usage(self.prepared, ends)

    def whole(self, choices: list[list[Token]]) -> bytes:
        """The answer of a call that does not stream: of each prompt the best of its choices."""
        shown = self.prepared
        made: list[Any] = []
        for start in range(0, len(choices), shown.best_of):
            mine = choices[start : start + shown.best_of]
            best = ranked(mine)[: shown.n] if shown.best_of > shown.n else range(shown.n)
            made += [self.choice(len(made) + place, mine[at]) for place, at in enumerate(best)]
        total = self.usage([end_of(tokens) for tokens in choices])
        return shapes.encode(self.reply(choices=made, usage=total, **self._envelope, **self.extra()))

    @abstractmethod
    def frames(self, index: int, token: Token) -> bytes:
        """The chunks of one token of a choice."""

    @abstractmethod
    def choice(self, index: int, tokens: list[Token]) -> Any:
        """A whole choice."""

    def extra(self) -> dict[str, Any]:
        """What the answer has beside its choices."""
        return {}
