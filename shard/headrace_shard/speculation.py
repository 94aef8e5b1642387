"""Speculative decoding: tokens are guessed, by prompt lookup or by a draft model, and checked several at once.

Prompt lookup guesses that what followed the last few tokens earlier in the text follows again; `draft` is the other way.
The guesses (draft tokens) are computed in the same forward pass as the row's last token. Every position is then sampled as
if it were alone, with its own random number; a draft token counts if it is what was chosen in its place. So the text is
the same with and without it, greedy or sampled, and a guess is accepted with the probability that the model gives it.

Source of the lookup: A. Saxena, Prompt Lookup Decoding (2023); of the acceptance rule for a proposal without a distribution
of its own: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023); of a draft that is drawn with
the very random number: Daliri et al., Coupling without Communication and Drafter-Invariant Speculative Decoding (2024).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headrace_shard.batch import RunningBatch
from headrace_shard.draft import Drafter
from headrace_shard.grammar.compiler import GrammarCompiler
from headrace_shard.kv.blocks import BLOCK_SIZE
from headrace_shard.pace import Pace
from headrace_shard.step import Ints

NGRAM = 3  # tokens that must have occurred before
HOPE = 0.7  # share of right guesses that a new request is credited with
WEIGHT, WEIGHT_OF_ALL = 0.1, 0.02  # of one guess in the moving average of a request, and of all requests
PAUSE = 64  # tokens after which a request whose guesses did not pay tries again
BACK_OFF = 8  # times as many after each try of the draft model, which must take in all that it missed
TRIES = 16  # new requests of which one tries the draft model although it did not pay for others
USED = 0.25  # share of the tokens that it may have that a request is expected to have
LOOK_PATIENCE = 0.001  # seconds that a lookup waits for its row's grammar
LOOKUP, MODEL = range(2)
Tokens: TypeAlias = npt.NDArray[np.int32]
Grow: TypeAlias = Callable[[int, int], bool]
NONE: Tokens = np.zeros(0, dtype=np.int32)
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Guessed:
    """The guessing for one step: its seconds, and how many tokens the draft model gave, and of these were right."""

    seconds: float = 0.0
    tokens: int = 0
    right: int = 0


@dataclass(frozen=True, slots=True)
class Wish:
    """Tokens wanted of the draft model. `is_try`: not because they pay, but to see whether they would."""

    most: int
    is_try: bool


class Speculation:
    """Draft tokens for rows, as many as pay, which differs from request to request and moment to moment."""

    def __init__(
        self, rows: RunningBatch, most: int, drafter: Drafter | None = None, grammars: GrammarCompiler | None = None,
    ) -> None:
        """`most`: draft tokens of a row and step; 0: none ever."""
        self.most, self.guessed = most, Guessed()
        self._rows, self._drafter, self._grammars = rows, drafter, grammars
        self._kind = np.zeros(rows.slots, dtype=np.int64)  # of the row's last guesses
        self._rate = np.full((2, rows.slots), HOPE)
        self._since = np.zeros((2, rows.slots), dtype=np.int64)  # tokens known when the row was last tried
        self._pause = np.full(rows.slots, PAUSE)  # of the draft model
        self._tried: frozenset[int] = frozenset()  # slots whose last guess was only to see whether they would pay
        self._order = np.zeros(rows.slots, dtype=np.int64)  # admission that these figures are about
        self._requests, self._hope = 0, HOPE  # what the draft model is credited with, by all requests so far

    def begin(self) -> None:
        """A step is to be planned."""
        self.guessed = Guessed()
        if self._drafter is not None:
            self._drafter.release()

    def propose(self, slots: Ints, room: int, grow: Grow, pace: Pace) -> dict[int, int]:
        """Write draft tokens behind the known ones of rows; returns how many each has, of those that have any.

        Args:
            slots: rows of the step, which get their next token.
            room: draft tokens of all together; also the tokens that a pass of the draft model takes in.
            grow: gives a row KV blocks for so many tokens, if there are.
        """
        if not self.most:
            return {}
        begin = time.perf_counter()
        counts: dict[int, int] = {}
        wishes: dict[int, Wish] = {}
        left, price = room, pace.draft_price() * len(slots)
        for slot in slots.tolist():
            known, constraint = self._known(slot), self._rows.constraints.get(slot)
            most = min(left, self.most, self._rows.tokens_left(slot) - 1, self._rows.max_tokens - known - 1)
            if most < 1 or (constraint is not None and constraint.late):
                continue
            self._welcome(slot)
            found = self._look_up(slot, most, price)
            if wish := self._wish(slot, most, len(slots), worth(self._rate[LOOKUP, slot], price, len(found))[1], pace):
                wishes[slot] = wish
                left -= wish.most
            elif len(found) and grow(slot, known + len(found)):
                self._write(slot, found)
                counts[slot] = len(found)
                left -= len(found)
        counts |= self._draft(wishes, len(slots), room, grow, pace)
        self.guessed.seconds = time.perf_counter() - begin
        return counts

    def learn(self, slot: int, proposed: int, right: int) -> None:
        """Take in how many of a row's guesses were right; those behind the first wrong one say nothing."""
        kind = self._kind[slot]
        for hit in [1.0] * right + [0.0] * (right < proposed):
            self._rate[kind, slot] += (hit - self._rate[kind, slot]) * WEIGHT
            if kind == MODEL:
                self._hope += (hit - self._hope) * WEIGHT_OF_ALL
        self._since[kind, slot] = self._known(slot)
        if kind == MODEL and self._drafter is not None:
            self._drafter.learn(slot, right)
            self.guessed.right += right
            if right:
                self._pause[slot] = PAUSE
            elif slot in self._tried:
                self._pause[slot] *= BACK_OFF

    def _known(self, slot: int) -> int:
        return int(self._rows.known[slot])

    def _welcome(self, slot: int) -> None:
        """Begin the record of a request that is new in its slot."""
        if self._order[slot] == self._rows.order[slot]:
            return
        self._order[slot], self._pause[slot] = self._rows.order[slot], PAUSE
        self._rate[:, slot] = HOPE, self._hope if self._requests % TRIES else HOPE
        self._since[:, slot] = self._known(slot)
        self._requests += 1

    # prompt lookup

    def _look_up(self, slot: int, most: int, price: float) -> Tokens:
        """What a lookup guesses, as many tokens as pay."""
        count, known = worth(self._rate[LOOKUP, slot], price, most)[0], self._known(slot)
        if not count and known - self._since[LOOKUP, slot] >= PAUSE:
            self._since[LOOKUP, slot], count = known, 1
        found = lookup(self._rows.tokens[slot, :known], count) if count else NONE
        constraint = self._rows.constraints.get(slot)
        if constraint is None or self._grammars is None or not len(found):
            return found
        self._grammars.wait([constraint], LOOK_PATIENCE)
        if not constraint.knows(0) or constraint.matcher is None:
            return NONE
        return found[: constraint.matcher.validate_tokens(found.tolist())]

    def _write(self, slot: int, found: Tokens) -> None:
        """Make what was looked up the row's draft tokens."""
        known, constraint = self._known(slot), self._rows.constraints.get(slot)
        self._rows.tokens[slot, known : known + len(found)] = found
        self._kind[slot] = LOOKUP
        if constraint is not None and self._grammars is not None:
            self._grammars.branch(constraint)
            self._grammars.look(constraint, found.tolist(), self._rows.tokens_left(slot))

    # the draft model

    def _wish(self, slot: int, most: int, at_work: int, gain: float, pace: Pace) -> Wish | None:
        """What to ask the draft model for a row whose lookup saves `gain`; None if that is as good, or nothing pays."""
        drafter, known = self._drafter, self._known(slot)
        if drafter is None or (most := min(most, drafter.most(slot))) < 1:
            return None
        each = pace.draft_price() * at_work + pace.round_price()
        count, saved = worth(self._rate[MODEL, slot], each, most)
        backlog, pause = drafter.backlog(slot), self._pause[slot]
        if not count and not gain and known - self._since[MODEL, slot] >= pause >= backlog - PAUSE:
            return Wish(1, is_try=True)
        # The time that its guesses save in the rest of the request is to be more than what it takes to catch up.
        rest = USED * self._rows.tokens_left(slot) * saved / (1 + saved + count * each)
        if saved <= gain or (backlog - 2) * pace.catch_up_price() * at_work > rest:
            return None
        return Wish(count, is_try=False)

    def _draft(self, wishes: dict[int, Wish], at_work: int, room: int, grow: Grow, pace: Pace) -> dict[int, int]:
        """Let the draft model guess for the rows that together are worth its passes; how many tokens each has."""
        verified, shared = pace.draft_price() * at_work, pace.round_price() * at_work
        while worthless := [
            s for s, w in wishes.items() if not w.is_try and self._rate[MODEL, s] <= verified + shared / len(wishes)
        ]:
            wishes = {slot: wish for slot, wish in wishes.items() if slot not in worthless}
        self._tried = frozenset(slot for slot, wish in wishes.items() if wish.is_try)
        wanted = {slot: w.most for slot, w in wishes.items() if grow(slot, self._known(slot) + w.most)}
        if not wanted or self._drafter is None:
            return {}
        # Where others wait for one that catches up, a step takes about twice its time at most.
        price = pace.catch_up_price()
        budget = min(room, max(BLOCK_SIZE, int(1 / price))) if price and at_work > 1 else room
        try:
            counts = self._drafter.guess(wanted, budget, pace)
        except RuntimeError:  # torch's own: out of memory, a shape that does not fit
            log.exception("the draft model failed; from here on there is none")
            self._drafter = None
            return {}
        self._kind[list(counts)] = MODEL
        self.guessed.tokens = sum(counts.values())
        return counts


def worth(chance: float, price: float, most: int) -> tuple[int, float]:
    """How many guesses pay, each right with this chance if those before it are; and what they save, in steps of one row."""
    right, count, saved = float(chance), 0, 0.0
    while count < most and right > price:
        saved += right - price
        right *= chance
        count += 1
    return count, saved


def lookup(tokens: npt.NDArray[np.int32], most: int) -> npt.NDArray[np.int32]:
    """The at most `most` tokens that followed the latest earlier occurrence of the last NGRAM tokens [n]; or none."""
    if len(tokens) <= NGRAM:
        return tokens[:0]
    ends = np.flatnonzero(tokens[NGRAM - 1 : -1] == tokens[-1]) + NGRAM - 1
    for back in range(1, NGRAM):
        ends = ends[tokens[ends - back] == tokens[-1 - back]]
    if not len(ends):
        return tokens[:0]
    # The latest one may be followed by too few tokens; an earlier one says more.
    enough = ends[ends + most < len(tokens)]
    start = int(enough[-1] if len(enough) else ends[0]) + 1
    return tokens[start : start + most].copy()
