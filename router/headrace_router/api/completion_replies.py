"""Tokens into the answers and chunks of /v1/completions, with the prompt before them if that is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from headrace_router.api import openai_types as shapes
from headrace_router.api.choices import end_of
from headrace_router.api.openai_replies import REASONS, Replies, is_end_token
from headrace_router.api.openai_requests import Prepared
from headrace_router.service import Service
from headrace_router.text.pieces import character_count, openai_token
from headrace_router.types import PromptToken, Token, TopToken


class CompletionReplies(Replies):
    """Answers of /v1/completions."""

    prefix, reply, chunk = "cmpl", shapes.CompletionReply, shapes.CompletionChunk

    def __init__(self, service: Service, prepared: Prepared) -> None:
        super().__init__(service, prepared)
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}  # characters of each choice so far

    def frames(self, index: int, token: Token) -> bytes:
        """The chunk of one token, if it has anything to say; the prompt's before the first."""
        out, shown = b"", self.shown
        if index not in self._begun:
            self._begun.add(index)
            first = self._prompt_choice(index, [token])
            if shown.echo or shown.token_ids:
                out += self.frame(first)
        if not shown.output:
            return out
        if token.text and token.end is None and not shown.logprobs and not shown.token_ids:
            out += self.text_frame(index, token.text, lambda text: shapes.CompletionChoice(index, text, None, None))
        elif token.text or token.end is not None or shown.logprobs or shown.token_ids:
            reason = REASONS[token.end.finish_reason] if token.end is not None else None
            ids = [token.id] if shown.token_ids else UNSET
            out += self.frame(shapes.CompletionChoice(index, token.text, self._columns(index, [token]), reason, ids))
        return out

    def choice(self, index: int, tokens: list[Token]) -> shapes.CompletionChoice:
        made, end = self._prompt_choice(index, tokens), end_of(tokens)
        if not self.shown.output:
            return made
        made.text += end.text
        made.finish_reason = REASONS[end.finish_reason]
        made.logprobs = _joined(made.logprobs, self._columns(index, tokens))
        if self.shown.token_ids:
            made.token_ids = [token.id for token in tokens]
        return made

    def _prompt_choice(self, index: int, tokens: list[Token]) -> shapes.CompletionChoice:
        """A choice with nothing but what is shown of the prompt; its log probabilities come with the first token."""
        shown, prompt = self.shown, self.prepared.prompts[index // self.prepared.n]
        made = shapes.CompletionChoice(index, prompt.text if shown.echo else "", None, None if shown.output else "length")
        self._offsets[index] = len(made.text)
        scored = tokens[0].prompt
        if shown.logprobs and scored is not None:
            made.logprobs = self._entries(scored, prompt.offsets or self._places(scored, 0))
        if shown.token_ids:
            made.prompt_token_ids = prompt.ids
        return made

    def _columns(self, index: int, tokens: list[Token]) -> shapes.CompletionLogprobs | None:
        """Of output tokens."""
        if not self.shown.logprobs:
            return None
        at, shown = self._offsets[index], [token for token in tokens if not is_end_token(token)]
        self._offsets[index] = at + sum(character_count(self.tokenizer, token.id) for token in shown)
        return self._entries(shown, self._places(shown, at))

    def _places(self, tokens: Sequence[Token | PromptToken], at: int) -> list[int]:
        """Where each token begins, if the first one begins after `at` characters."""
        places = []
        for token in tokens:
            places.append(at)
            at += character_count(self.tokenizer, token.id)
        return places

    def _entries(self, tokens: Sequence[Token | PromptToken], offsets: list[int]) -> shapes.CompletionLogprobs:
        top = [self._alternatives(token) for token in tokens] if self.prepared.requests[0].top_n_tokens else None
        return shapes.CompletionLogprobs(
            [openai_token(self.tokenizer, token.id) for token in tokens], [token.logprob for token in tokens], top, offsets
        )

    def _alternatives(self, token: Token | PromptToken) -> dict[str, float] | None:
        """The most likely tokens, and after them the token itself if it is none of them."""
        if token.logprob is None:
            return None
        made: dict[str, float] = {}
        for t in (*(token.top or ()), TopToken(token.id, token.logprob)):
            made.setdefault(openai_token(self.tokenizer, t.id), t.logprob)
        return made


def _joined(
    first: shapes.CompletionLogprobs | None, then: shapes.CompletionLogprobs | None
) -> shapes.CompletionLogprobs | None:
    if first is None or then is None:
        return first or then
    top = None if first.top_logprobs is None or then.top_logprobs is None else first.top_logprobs + then.top_logprobs
    return shapes.CompletionLogprobs(
        first.tokens + then.tokens, first.token_logprobs + then.token_logprobs, top, first.text_offset + then.text_offset
    )
