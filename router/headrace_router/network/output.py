"""The output of one leased job: token ids from a worker into tokens with text, and the end that they tell.

The gateway itself finds the end: end tokens, stop tokens, stop strings and the limit of tokens are its request's, so that a
worker cannot go past them, and a worker that is lost after its last token is not asked for more.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace

from headrace._common.tokenizing import Tokenizer
from headrace_router.network.frames import Malformed, Row
from headrace_router.network.jobs import Lease, Progress
from headrace_router.text.output import OutputText
from headrace_router.types import End, FinishReason, PromptToken, Token, TopToken

FINISHES: dict[str, FinishReason] = {"eos": "eos_token", "length": "length", "stop": "stop_sequence"}


def finish_of(told: str) -> FinishReason:
    """
    Raises:
        Malformed: it is not how a worker tells why an output ended.
    """
    if told not in FINISHES:
        raise Malformed(f"finish {told[:20]!r} is none of {', '.join(FINISHES)}")
    return FINISHES[told]


class Output(ABC):
    """One attempt at one job, whatever the worker sends.

    Attributes:
        length: tokens of the output so far.
        sent, last_token: time.monotonic() when the job was handed over, and of the attempt's last token.
        heard: the worker has said something of the job.
        duplicates: tokens among the rows that were taken last, that were there already.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.length = len(lease.generated)
        self.sent = time.monotonic()
        self.last_token: float | None = None
        self.heard = False
        self.duplicates = 0
        self._began = time.perf_counter()
        self._cached_tokens, self._waited = 0, 0.0

    def begin(self, cached_tokens: int, waited: float) -> None:
        """The worker has computed the prompt, of which it had so many tokens, after so many seconds in its own queue."""
        self._cached_tokens = min(max(cached_tokens, 0), len(self.lease.job.request.prompt))
        self._waited = min(max(waited, 0.0), time.perf_counter() - self._began)

    @property
    def stop_string(self) -> str | None:
        """The one that has ended the output."""
        return None

    @abstractmethod
    def _flush(self) -> None:
        """No text follows."""

    @property
    @abstractmethod
    def text(self) -> str:
        """All text of the output so far."""

    def finish(self, reason: str) -> Progress:
        """The worker says that it has ended, with no token that tells it.

        Raises:
            Malformed: for no reason that there is.
        """
        why = finish_of(reason)
        self._flush()
        return Progress(self.lease.job.id, self.lease.attempt, self.length, [], self.end(why))

    def end(self, reason: FinishReason) -> End:
        """What `done` tells."""
        request = self.lease.job.request
        return End(
            finish_reason=reason, text=self.text, generated_tokens=self.length, input_length=len(request.prompt),
            seed=request.sampling.seed, cached_tokens=self._cached_tokens,
            queue_seconds=self.lease.queue_seconds + self._waited,
            inference_seconds=time.perf_counter() - self._began - self._waited, stop_string=self.stop_string,
        )


class JobOutput(Output):
    """The output of a worker that sends token ids."""

    def __init__(self, lease: Lease, tokenizer: Tokenizer, eos_ids: Collection[int], vocab_size: int) -> None:
        super().__init__(lease)
        self._tokenizer, self._eos_ids, self._vocab_size = tokenizer, eos_ids, vocab_size
        self._text = OutputText.of(tokenizer, replace(lease.job.request, generated=lease.generated))
        self._prompt: list[PromptToken] | None = None

    def take_prompt(self, rows: Sequence[tuple[int, float | None, list[tuple[int, float]] | None]]) -> None:
        """Log probabilities of the prompt, to go out with the first token; what was not asked for is left out."""
        request = self.lease.job.request
        if request.prompt_logprobs:
            most = request.prompt_top_n_tokens
            self._prompt = [
                PromptToken(token, logprob, None if top is None else [TopToken(*pair) for pair in top[:most]])
                for token, logprob, top in rows[: len(request.prompt)]
            ]

    def take(self, rows: Sequence[Row]) -> Progress:
        """New tokens, the first of them at the index of the first row.

        Raises:
            Malformed: the rows do not follow each other, or a token is not in the vocabulary.
        """
        first = rows[0][2]
        self.duplicates = 0
        tokens: list[Token] = []
        end = None
        for place, (_, _, index, token_id, logprob, _, top) in enumerate(rows):
            if index != first + place or not 0 <= token_id < self._vocab_size:
                raise Malformed(f"token {token_id} at {index} does not follow")
            if index >= self.lease.job.request.max_new_tokens:
                raise Malformed(f"token {index} is more than was asked for")
            if index < self.length or end is not None:
                self.duplicates += end is None
                continue  # is in the log; or beyond the end
            if index > self.length:
                break  # a gap: the broker sees it by the index
            token, reason = self._make(token_id, logprob, top)
            tokens.append(token)
            if reason is not None:
                end = self.end(reason)
        return Progress(self.lease.job.id, self.lease.attempt, max(first, self.length - len(tokens)), tokens, end)

    def _make(self, token_id: int, logprob: float | None, top: list[tuple[int, float]]) -> tuple[Token, FinishReason | None]:
        request = self.lease.job.request
        self.length += 1
        reason: FinishReason | None = None
        silent = False  # an end token is no part of the text
        if token_id in self._eos_ids and not request.ignore_eos:
            reason, silent = "eos_token", True
        elif token_id in request.stop_token_ids:
            reason, silent = "stop_sequence", not request.keep_stop
        elif self.length >= request.max_new_tokens:
            reason = "length"
        text = "" if silent else self._text.push(token_id)
        if reason is not None:
            text += self._text.finish()
        if self._text.stopped:
            reason = "stop_sequence"
        special = silent or token_id in self._tokenizer.special_ids
        token = Token(token_id, math.nan if logprob is None else logprob, text, special)
        token.top = [TopToken(*pair) for pair in top[: request.top_n_tokens]] if request.top_n_tokens else None
        token.prompt, self._prompt = self._prompt, None
        return token, reason

    def _flush(self) -> None:
        self._text.finish()

    @property
    def text(self) -> str:
        return self._text.text

    @property
    def stop_string(self) -> str | None:
        return self._text.stop_string
