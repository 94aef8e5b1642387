"""Tokens into OpenAI's answers and chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import headrace
from headrace_router import sse
from headrace_router.api import openai_types as shapes
from headrace_router.service import Service
from headrace_router.text.pieces import openai_token, token_bytes
from headrace_router.types import End, FinishReason, Token

REASONS: dict[FinishReason, str] = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


def usage(ends: list[End]) -> shapes.Usage:
    """Token counts of all choices of a call."""
    prompt = sum(end.input_length for end in ends)
    completion = sum(end.generated_tokens for end in ends)
    return shapes.Usage(prompt, completion, prompt + completion)


def _is_end_token(token: Token) -> bool:
    return token.end is not None and token.end.finish_reason == "eos_token"


class _Replies:
    """One id and one time for a whole call."""

    def __init__(self, service: Service, prefix: str, kind: str, chunk_kind: str) -> None:
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._kind, self._chunk_kind = kind, chunk_kind
        self._model = service.model_name
        self._fingerprint = f"headrace-{headrace.__version__}"
        self._tokenizer = service.text.tokenizer
        self._of_text: dict[int, sse.FrameOfText] = {}  # by choice

    def _reply(self, kind: str, choices: list[object], total: shapes.Usage | None = None) -> shapes.Reply:
        reply = shapes.Reply(self._id, kind, self._created, self._model, self._fingerprint, choices)
        if total is not None:
            reply.usage = total
        return reply

    def _data(self, choice: object) -> bytes:
        return shapes.encode(self._reply(self._chunk_kind, [choice]))

    def _frame(self, choice: object) -> bytes:
        return sse.frame(self._data(choice))

    def _text_frame(self, index: int, text: str, choice: Callable[[str], object]) -> bytes:
        """A chunk that differs from others of its choice in its text alone; `choice` makes it of a text."""
        made = self._of_text.get(index)
        if made is None:
            made = self._of_text[index] = sse.FrameOfText(lambda text: self._data(choice(text)))
        return made(text)

    def usage_frame(self, ends: list[End]) -> bytes:
        """The extra chunk at the end of a stream that asked for usage."""
        return sse.frame(shapes.encode(self._reply(self._chunk_kind, [], usage(ends))))

    def _whole(self, choices: list[object], ends: list[End]) -> bytes:
        return shapes.encode(self._reply(self._kind, choices, usage(ends)))


class ChatReplies(_Replies):
    """Answers of /v1/chat/completions."""

    def __init__(self, service: Service, logprobs: bool) -> None:
        super().__init__(service, "chatcmpl", "chat.completion", "chat.completion.chunk")
        self._logprobs = logprobs
        self._begun = False

    def _content(self, tokens: list[Token]) -> shapes.ChatLogprobs | None:
        if not self._logprobs:
            return None
        return shapes.ChatLogprobs([self._entry(token) for token in tokens if not _is_end_token(token)])

    def _entry(self, token: Token) -> shapes.TokenLogprob:
        top = [self._alternative(t.id, t.logprob) for t in token.top or ()]
        shown = self._alternative(token.id, token.logprob)
        return shapes.TokenLogprob(shown.token, shown.logprob, shown.bytes, top)

    def _alternative(self, token_id: int, logprob: float) -> shapes.TopLogprob:
        tokenizer = self._tokenizer
        return shapes.TopLogprob(openai_token(tokenizer, token_id), logprob, token_bytes(tokenizer, token_id))

    def frames(self, index: int, token: Token) -> bytes:
        """The chunks of one token: the role before the first, the finish reason after the last."""
        out = b""
        if not self._begun:
            self._begun = True
            out += self._frame(shapes.ChatChunkChoice(index, shapes.Delta("assistant", ""), None, None))
        if token.text and not self._logprobs:
            out += self._text_frame(
                index, token.text, lambda text: shapes.ChatChunkChoice(index, shapes.Delta(content=text), None, None)
            )
        elif self._logprobs and not _is_end_token(token):
            delta = shapes.Delta(content=token.text)
            out += self._frame(shapes.ChatChunkChoice(index, delta, self._content([token]), None))
        if token.end is not None:
            reason = REASONS[token.end.finish_reason]
            out += self._frame(shapes.ChatChunkChoice(index, shapes.Delta(), None, reason))
        return out

    def whole(self, choices: list[list[Token]], ends: list[End]) -> bytes:
        """The answer of a call that does not stream."""
        made: list[object] = []
        for index, (tokens, end) in enumerate(zip(choices, ends, strict=True)):
            message = shapes.AssistantMessage("assistant", end.text)
            reason = REASONS[end.finish_reason]
            made.append(shapes.ChatChoice(index, message, self._content(tokens), reason))
        return self._whole(made, ends)


class CompletionReplies(_Replies):
    """Answers of /v1/completions."""

    def __init__(self, service: Service, logprobs: int | None) -> None:
        super().__init__(service, "cmpl", "text_completion", "text_completion")
        self._logprobs = logprobs
        self._offsets: dict[int, int] = {}  # characters of each choice so far

    def _columns(self, index: int, tokens: list[Token]) -> shapes.CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        tokenizer, shown = self._tokenizer, [token for token in tokens if not _is_end_token(token)]
        texts = [openai_token(tokenizer, token.id) for token in shown]
        offsets, at = [], self._offsets.get(index, 0)
        for text in texts:
            offsets.append(at)
            at += len(text)
        self._offsets[index] = at
        top = None
        if self._logprobs:
            top = [{openai_token(tokenizer, t.id): t.logprob for t in token.top or ()} for token in shown]
        return shapes.CompletionLogprobs(texts, [token.logprob for token in shown], top, offsets)

    def frames(self, index: int, token: Token) -> bytes:
        """The chunk of one token, if it has anything to say."""
        if not token.text and token.end is None and self._logprobs is None:
            return b""
        if token.end is None and self._logprobs is None:
            return self._text_frame(index, token.text, lambda text: shapes.CompletionChoice(index, text, None, None))
        reason = REASONS[token.end.finish_reason] if token.end is not None else None
        choice = shapes.CompletionChoice(index, token.text, self._columns(index, [token]), reason)
        return self._frame(choice)

    def whole(self, choices: list[list[Token]], ends: list[End]) -> bytes:
        """The answer of a call that does not stream."""
        made: list[object] = []
        for index, (tokens, end) in enumerate(zip(choices, ends, strict=True)):
            reason = REASONS[end.finish_reason]
            made.append(shapes.CompletionChoice(index, end.text, self._columns(index, tokens), reason))
        return self._whole(made, ends)
