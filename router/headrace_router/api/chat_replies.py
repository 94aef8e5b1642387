"""Tokens into the answers and chunks of /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from headrace_router.api import openai_types as shapes
from headrace_router.api.chat_requests import PreparedChat
from headrace_router.api.choices import end_of
from headrace_router.api.openai_replies import REASONS, Replies, is_end_token
from headrace_router.api.tool_types import FunctionCalled, FunctionDelta, ToolCalled, ToolDelta
from headrace_router.service import Service
from headrace_router.text.message import MessageReader
from headrace_router.text.parts import Arguments, CallBegin, Part, Reasoning, Text
from headrace_router.text.pieces import openai_token, token_bytes
from headrace_router.types import End, Token


def call_id() -> str:
    """The id of a new call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatReplies(Replies):
    """Answers of /v1/chat/completions."""

    prefix, reply, chunk = "chatcmpl", shapes.ChatReply, shapes.ChatChunk

    def __init__(self, service: Service, prepared: PreparedChat) -> None:
        super().__init__(service, prepared)
        self._reading = prepared.reading
        self._legacy = prepared.reading.use is not None and prepared.reading.use.legacy
        self._readers: dict[int, MessageReader] = {}  # of the choices that have begun
        self._reasoning_tokens = 0

    def extra(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prepared.prompts[0].ids} if self.shown.token_ids else {}

    def usage(self, ends: Sequence[End]) -> shapes.Usage:
        made = super().usage(ends)
        if self._reading.thinks:
            count = self._reasoning_tokens + sum(reader.reasoning_tokens for reader in self._readers.values())
            if made.completion_tokens_details is UNSET:
                made.completion_tokens_details = shapes.CompletionDetails()
            made.completion_tokens_details.reasoning_tokens = count
        return made

    def _logprobs(self, tokens: list[Token]) -> shapes.ChatLogprobs | None:
        if not self.shown.logprobs:
            return None
        return shapes.ChatLogprobs([self._entry(token) for token in tokens if not is_end_token(token)])

    def _entry(self, token: Token) -> shapes.TokenLogprob:
        top = [self._alternative(t.id, t.logprob) for t in token.top or ()]
        shown = self._alternative(token.id, token.logprob)
        return shapes.TokenLogprob(shown.token, shown.logprob, shown.bytes, top)

    def _alternative(self, token_id: int, logprob: float) -> shapes.TopLogprob:
        tokenizer = self.tokenizer
        return shapes.TopLogprob(openai_token(tokenizer, token_id), logprob, token_bytes(tokenizer, token_id))

    def frames(self, index: int, token: Token) -> bytes:
        """The chunks of one token: the role before the first, the finish reason after the last."""
        out = b""
        reader = self._readers.get(index)
        if reader is None:
            extra = {} if self._readers else self.extra()
            reader = self._readers[index] = self._reading.reader(whole=False)
            out += self.frame(shapes.ChatChunkChoice(index, shapes.Delta("assistant", ""), None, None), **extra)
        parts = reader.push(token.text)
        if token.end is not None:
            parts += reader.finish(token.end.finish_reason == "length")
        deltas = self._deltas(parts, reader)
        ids = [token.id] if self.shown.token_ids else UNSET
        if not deltas and (ids or (self.shown.logprobs and not is_end_token(token))):
            deltas = [shapes.Delta(content="")]
        if len(parts) == 1 and isinstance(parts[0], Text) and not ids and not self.shown.logprobs:
            deltas = []
            out += self.text_frame(
                index, parts[0].text, lambda text: shapes.ChatChunkChoice(index, shapes.Delta(content=text), None, None)
            )
        for place, delta in enumerate(deltas):
            logprobs = self._logprobs([token] if place == 0 else [])
            out += self.frame(shapes.ChatChunkChoice(index, delta, logprobs, None, [] if ids and place else ids))
        if token.end is not None:
            out += self.frame(shapes.ChatChunkChoice(index, shapes.Delta(), None, self._reason(token.end, reader)))
        return out

    def _deltas(self, parts: list[Part], reader: MessageReader) -> list[shapes.Delta]:
        index = reader.calls - sum(isinstance(part, CallBegin) for part in parts) - 1
        made = []
        for part in parts:
            index += isinstance(part, CallBegin)
            made.append(self._delta(part, index))
        return made

    def _delta(self, part: Part, index: int) -> shapes.Delta:
        if isinstance(part, Text):
            return shapes.Delta(content=part.text)
        if isinstance(part, Reasoning):
            return shapes.Delta(reasoning_content=part.text)
        begins = isinstance(part, CallBegin)
        function = FunctionDelta(part.name, "") if isinstance(part, CallBegin) else FunctionDelta(arguments=part.text)
        if self._legacy:
            return shapes.Delta(function_call=function)
        tool = ToolDelta(index, call_id(), "function", function) if begins else ToolDelta(index, function=function)
        return shapes.Delta(tool_calls=[tool])

    def _reason(self, end: End, reader: MessageReader) -> shapes.ChatFinishReason:
        reason = REASONS[end.finish_reason]
        if reason == "stop" and reader.calls:
            return "function_call" if self._legacy else "tool_calls"
        return reason

    def choice(self, index: int, tokens: list[Token]) -> shapes.ChatChoice:
        end, reader = end_of(tokens), self._reading.reader(whole=True)
        parts = reader.whole([token.text for token in tokens], end.finish_reason == "length")
        self._reasoning_tokens += reader.reasoning_tokens
        ids = [token.id for token in tokens] if self.shown.token_ids else UNSET
        message = self._message(parts)
        return shapes.ChatChoice(index, message, self._logprobs(tokens), self._reason(end, reader), ids)

    def _message(self, parts: list[Part]) -> shapes.AssistantMessage:
        text = "".join(part.text for part in parts if isinstance(part, Text))
        thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = called(parts)
        made = shapes.AssistantMessage("assistant", None if calls and not text else text, thoughts or UNSET)
        if calls and self._legacy:
            made.function_call = calls[0]
        elif calls:
            made.tool_calls = [ToolCalled(call_id(), call) for call in calls]
        return made


def called(parts: list[Part]) -> list[FunctionCalled]:
    """The calls among the parts of an output."""
    made: list[FunctionCalled] = []
    for part in parts:
        if isinstance(part, CallBegin):
            made.append(FunctionCalled(part.name, ""))
        elif isinstance(part, Arguments):
            made[-1].arguments += part.text
    return made
