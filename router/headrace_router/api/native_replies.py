"""Tokens into the answers and events of TGI's native API."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from headrace._common.tokenizing import Tokenizer
from headrace_router.api import native_types as shapes
from headrace_router.api.choices import end_of, ranked
from headrace_router.api.native_requests import Prepared
from headrace_router.text.pieces import token_text
from headrace_router.types import Token, TopToken


def whole(tokenizer: Tokenizer, prepared: Prepared, choices: Sequence[list[Token]]) -> shapes.GenerateOut:
    """The answer to one prompt: the best of its sequences, the others among its details."""
    best, *others = ranked(choices)
    tokens = choices[best]
    out = shapes.GenerateOut(prepared.prompt_text + end_of(tokens).text)
    if prepared.details:
        out.details = _details(tokenizer, tokens)
        if others:
            out.details.best_of_sequences = [_sequence(tokenizer, prepared, choices[at]) for at in sorted(others)]
    return out


def event(tokenizer: Tokenizer, prepared: Prepared, index: int, token: Token) -> shapes.StreamOut:
    """One event of a stream; the last one has the whole text."""
    out = shapes.StreamOut(index, _token(tokenizer, token), None, None)
    if token.top:
        out.top_tokens = _top(tokenizer, token.top)
    if (end := token.end) is not None:
        out.generated_text = prepared.prompt_text + end.text
        if prepared.details:
            out.details = shapes.StreamDetailsOut(end.finish_reason, end.generated_tokens, end.seed, end.input_length)
    return out


def _token(tokenizer: Tokenizer, token: Token) -> shapes.TokenOut:
    """A special token shows as it is written; it adds nothing to the text."""
    text = token_text(tokenizer, token.id) if token.special else token.text
    return shapes.TokenOut(token.id, text, token.logprob, token.special)


def _top(tokenizer: Tokenizer, top: list[TopToken]) -> list[shapes.TokenOut]:
    return [shapes.TokenOut(t.id, token_text(tokenizer, t.id), t.logprob, t.id in tokenizer.special_ids) for t in top]


def _prefill(tokenizer: Tokenizer, tokens: list[Token]) -> list[shapes.PrefillOut]:
    prompt = next((token.prompt for token in tokens if token.prompt is not None), [])
    return [shapes.PrefillOut(p.id, token_text(tokenizer, p.id), p.logprob) for p in prompt]


def _details(tokenizer: Tokenizer, tokens: list[Token]) -> shapes.DetailsOut:
    end = end_of(tokens)
    return shapes.DetailsOut(
        finish_reason=end.finish_reason, generated_tokens=end.generated_tokens, seed=end.seed,
        prefill=_prefill(tokenizer, tokens), tokens=[_token(tokenizer, token) for token in tokens],
        top_tokens=[_top(tokenizer, token.top) for token in tokens if token.top] or UNSET,
    )


def _sequence(tokenizer: Tokenizer, prepared: Prepared, tokens: list[Token]) -> shapes.BestOfOut:
    details = _details(tokenizer, tokens)
    return shapes.BestOfOut(
        generated_text=prepared.prompt_text + end_of(tokens).text, finish_reason=details.finish_reason,
        generated_tokens=details.generated_tokens, seed=details.seed, prefill=details.prefill, tokens=details.tokens,
        top_tokens=details.top_tokens,
    )
