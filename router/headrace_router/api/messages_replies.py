"""Tokens into the answer and the events of /v1/messages."""

from __future__ import annotations

import json
import uuid

from headrace._common.errors import HeadraceError
from headrace_router import sse
from headrace_router.api import messages_types as shapes
from headrace_router.api.chat_requests import PreparedChat
from headrace_router.api.choices import end_of
from headrace_router.api.errors import anthropic_event
from headrace_router.service import Service
from headrace_router.text.parts import CallBegin, Part, Reasoning, Text
from headrace_router.types import End, Token


class MessageReplies:
    """The answer to one call of /v1/messages."""

    def __init__(self, service: Service, prepared: PreparedChat) -> None:
        self._reader = prepared.reading.reader(whole=not prepared.shown.stream)
        self._prompt_tokens = len(prepared.prompts[0].ids)
        self._id, self._model = f"msg_{uuid.uuid4().hex}", service.model_name
        self._begun = False
        self._index = -1  # of the block that is open
        self._kind: type[Part] | None = None  # of its parts

    def frames(self, index: int, token: Token) -> bytes:
        """The events of one token."""
        out = self._begin()
        for part in self._parts(token):
            out += self._part(part)
        return out

    def last_frames(self, ends: list[End]) -> bytes:
        """The end of the open block, and of the message."""
        reason, stop = self._stop(ends[0])
        delta = shapes.MessageDelta(shapes.Stopped(reason, stop), _usage(ends[0]))
        return self._close() + _frame(delta) + _frame(shapes.MessageStop())

    def error_frames(self, error: HeadraceError) -> bytes:
        """The last event of a stream that fails."""
        return anthropic_event(error)

    def whole(self, choices: list[list[Token]]) -> bytes:
        """The answer of a call that does not stream."""
        end = end_of(choices[0])
        parts = [part for token in choices[0] for part in self._parts(token)]
        reason, stop = self._stop(end)
        return shapes.encode(shapes.MessageReply(
            id=self._id, model=self._model, content=_blocks(parts), stop_reason=reason, stop_sequence=stop, usage=_usage(end)
        ))

    def _parts(self, token: Token) -> list[Part]:
        made = self._reader.push(token.text)
        return made + self._reader.finish(token.end.finish_reason == "length") if token.end is not None else made

    def _stop(self, end: End) -> tuple[shapes.StopReason, str | None]:
        if end.finish_reason == "length":
            return "max_tokens", None
        if self._reader.calls:
            return "tool_use", None
        return ("stop_sequence", end.stop_string) if end.stop_string is not None else ("end_turn", None)

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        usage = shapes.MessageUsage(self._prompt_tokens, 0)
        return _frame(shapes.MessageStart(shapes.MessageReply(id=self._id, model=self._model, content=[], usage=usage)))

    def _part(self, part: Part) -> bytes:
        if isinstance(part, CallBegin):
            return self._open(part, shapes.ToolUseOut(_call_id(), part.name, {}))
        delta: shapes.MessageTextDelta | shapes.ThinkingDelta | shapes.InputDelta
        out = b""
        if isinstance(part, Text):
            delta = shapes.MessageTextDelta(part.text)
            if self._kind is not Text:
                out = self._open(part, shapes.TextOut(""))
        elif isinstance(part, Reasoning):
            delta = shapes.ThinkingDelta(part.text)
            if self._kind is not Reasoning:
                out = self._open(part, shapes.ThinkingOut(""))
        else:
            delta = shapes.InputDelta(part.text)
        return out + _frame(shapes.BlockDelta(self._index, delta))

    def _open(self, part: Part, block: shapes.BlockOut) -> bytes:
        out = self._close()
        self._kind = type(part)
        self._index += 1
        return out + _frame(shapes.BlockStart(self._index, block))

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return _frame(shapes.BlockStop(self._index))


def _blocks(parts: list[Part]) -> list[shapes.BlockOut]:
    """The blocks of a whole output."""
    made: list[shapes.BlockOut] = []
    texts: list[str] = []  # of each block
    for part in parts:
        last = made[-1] if made else None
        if isinstance(part, CallBegin):
            made.append(shapes.ToolUseOut(_call_id(), part.name, {}))
            texts.append("")
            continue
        if isinstance(part, Text) and not isinstance(last, shapes.TextOut):
            made.append(shapes.TextOut(""))
            texts.append("")
        elif isinstance(part, Reasoning) and not isinstance(last, shapes.ThinkingOut):
            made.append(shapes.ThinkingOut(""))
            texts.append("")
        texts[-1] += part.text
    for block, text in zip(made, texts, strict=True):
        if isinstance(block, shapes.TextOut):
            block.text = text
        elif isinstance(block, shapes.ThinkingOut):
            block.thinking = text
        else:
            block.input = _input(text)
    return made


def _input(arguments: str) -> dict[str, object]:
    """Arguments as an object; empty if the limit has cut them."""
    try:
        made = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return made if isinstance(made, dict) else {}


def _usage(end: End) -> shapes.MessageUsage:
    return shapes.MessageUsage(end.input_length - end.cached_tokens, end.generated_tokens, end.cached_tokens)


def _call_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"


def _frame(event: shapes.AnyEvent) -> bytes:
    return sse.frame(shapes.encode(event), str(type(event).__struct_config__.tag))
