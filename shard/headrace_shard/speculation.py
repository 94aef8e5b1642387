"""Speculative decoding by prompt lookup: what followed the last few tokens earlier in the text is guessed to follow again.

The guesses (draft tokens) are computed in the same forward pass as the row's last token. Every position is then sampled as
if it were alone, with its own random number; a draft token counts if it is what was chosen in its place. So the text is
the same with and without it, greedy or sampled, and a guess is accepted with the probability that the model gives it.

Source of the lookup: A. Saxena, Prompt Lookup Decoding (2023); of the acceptance rule for a proposal without a distribution
of its own: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace_shard.batch import RunningBatch
from headrace_shard.pace import Pace

NGRAM = 3  # tokens that must have occurred before
HOPE = 0.7  # share of right guesses that a new request is credited with
WEIGHT = 0.1  # of one guess in the moving average of a request
PAUSE = 64  # tokens after which a request whose guesses did not pay tries again


class Speculation:
    """Draft tokens for rows, as many as pay, which differs from request to request and moment to moment."""

    def __init__(self, rows: RunningBatch, most: int) -> None:
        """`most`: draft tokens of a row and step; 0: none ever."""
        self.most = most
        self._rows = rows
        self._rate = np.full(rows.slots, HOPE)
        self._since = np.zeros(rows.slots, dtype=np.int64)  # tokens known when the row was last tried
        self._order = np.zeros(rows.slots, dtype=np.int64)  # admission that these figures are about

    def propose(self, slot: int, at_work: int, pace: Pace) -> int:
        """Write draft tokens behind the row's known ones; returns how many. `at_work`: rows of the step."""
        rows = self._rows
        request = rows.request(slot)
        known = int(rows.known[slot])
        most = min(
            self.most, int(rows.prompt[slot] + rows.max_new[slot]) - known - 1, rows.max_tokens - known - 1,
            self._worth(slot, at_work, pace),
        )
        if most < 1 or request.constraint is not None:
            return 0
        draft = lookup(rows.tokens[slot, :known], most)
        rows.tokens[slot, known : known + len(draft)] = draft
        return len(draft)

    def learn(self, slot: int, proposed: int, right: int) -> None:
        """Take in how many of a row's guesses were right; those behind the first wrong one say nothing."""
        for hit in [1.0] * right + [0.0] * (right < proposed):
            self._rate[slot] += (hit - self._rate[slot]) * WEIGHT
        self._since[slot] = self._rows.known[slot]

    def _worth(self, slot: int, at_work: int, pace: Pace) -> int:
        """Guesses of which each saves more time, by its chance to count, than it costs."""
        rows = self._rows
        if self._order[slot] != rows.order[slot]:
            self._order[slot], self._rate[slot], self._since[slot] = rows.order[slot], HOPE, rows.known[slot]
        price = pace.draft_price() * at_work
        chance, count = float(self._rate[slot]), 0
        while count < self.most and chance > price:
            chance *= self._rate[slot]
            count += 1
        if not count and rows.known[slot] - self._since[slot] >= PAUSE:
            self._since[slot] = rows.known[slot]
            return 1
        return count


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
