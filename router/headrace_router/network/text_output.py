"""Jobs at workers that speak text: what they are asked, and what comes of their answers.

The text is the worker's. Token ids are its own where it tells them, else those that this tokenizer writes the text with, so
that all APIs have some: no other worker goes on after them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace._common.tokenizing import Tokenizer
from headrace_router.network.frames import Malformed, TextRow
from headrace_router.network.jobs import Lease, Progress
from headrace_router.network.output import Output, finish_of
from headrace_router.text.stops import StopFinder
from headrace_router.types import FinishReason, GenerateRequest, Token, TopToken

LONGEST_TEXT = 4096  # characters of one row


def needs(request: GenerateRequest, leading: Sequence[int]) -> frozenset[str]:
    """What a request asks of a worker that speaks text, beside greedy or sampled text.

    `leading`: ids that a tokenizer puts before every text by itself.
    """
    sampling = request.sampling
    fields = (
        "temperature", "top_k", "top_p", "typical_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    )
    made = {name for name in fields if getattr(sampling, name) is not None}
    made |= {name for name in ("logit_bias", "watermark") if getattr(sampling, name)}
    flags = ("ignore_eos", "stop_token_ids", "top_n_tokens", "prompt_logprobs", "shown_tokens")
    made |= {name for name in flags if getattr(request, name)}
    if request.min_new_tokens:
        made.add("min_tokens")
    if request.grammar is not None:
        made.add(f"grammar.{request.grammar.kind}")
    if tuple(request.prompt[: len(leading)]) != tuple(leading):
        made.add("bare_prompt")
    return frozenset(made)


class TextOutput(Output):
    """The output of a worker that sends text. It always begins with the first token."""

    def __init__(
        self, lease: Lease, tokenizer: Tokenizer, leading: Sequence[int], eos_id: int, vocab_size: int
    ) -> None:
        super().__init__(lease)
        request = lease.job.request
        self._tokenizer, self._eos_id, self._vocab_size = tokenizer, eos_id, vocab_size
        self._shown = frozenset(request.shown_tokens)
        self._stops = StopFinder(request.stop, request.keep_stop) if request.stop else None
        self._rows = 0
        self._uncut = ""  # text that is no token yet: white space that the tokenizer joins to what follows
        self._parts: list[str] = []
        self.prompt_text = tokenizer.decode(request.prompt[len(leading) :], skip_special_tokens=False)

    def take(self, rows: Sequence[TextRow]) -> Progress:
        """New text.

        Raises:
            Malformed: the rows do not follow each other, are more than there may be tokens, or are no text of the vocabulary's.
        """
        first, tokens = self.length, list[Token]()
        reason: FinishReason | None = None
        for _, _, number, text, token_id, logprob, top, finish in rows:
            if number != self._rows or (text and number >= self.lease.job.request.max_new_tokens):
                raise Malformed(f"row {number} does not follow")
            if len(text) > LONGEST_TEXT or not (token_id is None or 0 <= token_id < self._vocab_size):
                raise Malformed(f"row {number} has too much text, or a token that is not in the vocabulary")
            self._rows += 1
            if reason is not None:
                continue  # beyond a stop string
            tokens += self._make(text, token_id, math.nan if logprob is None else logprob, top)
            if self._stops is not None and self._stops.found is not None:
                reason = "stop_sequence"
            elif finish is not None:
                reason = finish_of(finish)
                if reason == "eos_token" and not (tokens and tokens[-1].special):  # every output that ends so has one
                    tokens += self._make("", self._eos_id, math.nan, [])
                self._flush()
        end = self.end(reason) if reason is not None else None
        return Progress(self.lease.job.id, self.lease.attempt, first, tokens, end)

    def _make(self, text: str, token_id: int | None, logprob: float, top: list[tuple[int, float]]) -> list[Token]:
        if token_id is not None:
            special = token_id in self._tokenizer.special_ids
            if special:
                text = self._tokenizer.text_of(token_id) if token_id in self._shown else ""
            cut = [(token_id, text)]
        else:
            special, cut = False, self._cut(text)
        tokens = [Token(i, logprob, self._say(part), special) for i, part in cut]
        if tokens and (most := self.lease.job.request.top_n_tokens):
            tokens[0].top = [TopToken(*pair) for pair in top[:most]]
        self.length += len(tokens)
        return tokens

    def _cut(self, text: str) -> list[tuple[int, str]]:
        """The ids that write a text, each with its share; together the shares are the text."""
        text = self._uncut + text
        pieces = self._tokenizer.pieces(text, add_special_tokens=False)
        self._uncut = "" if pieces else text
        cut, at = [], 0
        for piece in pieces[:-1]:
            cut.append((piece.id, text[at : max(at, piece.stop)]))
            at = max(at, piece.stop)
        return [*cut, (pieces[-1].id, text[at:])] if pieces else []

    def _say(self, text: str) -> str:
        """The part of the text that may go out."""
        if self._stops is not None and self._rows > self.lease.job.request.min_new_tokens:
            text = self._stops.push(text)
        if text:
            self._parts.append(text)
        return text

    def _flush(self) -> None:
        self._say(self._uncut)
        if self._stops is not None:
            self._parts.append(self._stops.flush())

    @property
    def text(self) -> str:
        return "".join(self._parts)
