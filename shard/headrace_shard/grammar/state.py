"""Where one request is in its grammar."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance

from headrace._common.grammars import Grammar
from headrace_shard.sampling.bits import Bits, discard, none_of


class Constraint:
    """The matcher of one request. While it is `busy` a thread works on it, and nobody else may look inside.

    Attributes:
        late: it was not ready when a step wanted it; its row sits out until it is.
        error: why the request cannot go on.
        mask: what may follow; end tokens among it where the output may end.
        branch, ahead: the matcher behind the draft tokens, if there are any; what may follow each of them, as far as the
            grammar lets them follow.
    """

    __slots__ = ("ahead", "branch", "busy", "error", "grammar", "late", "mask", "matcher")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.busy, self.late = True, False
        self.error: str | None = None
        self.matcher: llguidance.LLMatcher | None = None
        self.mask = none_of(0)
        self.branch: llguidance.LLMatcher | None = None
        self.ahead: list[Bits] = []

    @property
    def sits_out(self) -> bool:
        """Whether the row has to miss steps: others must not wait for its mask."""
        return self.late and self.busy

    def knows(self, drafted: int) -> bool:
        """Whether it has the mask behind so many draft tokens."""
        return not self.busy and self.error is None and drafted <= len(self.ahead)

    def allowed(self, forbidden: Sequence[int], drafted: int = 0) -> Bits:
        """The mask behind so many draft tokens without tokens that may not be chosen yet, unless nothing else may follow:
        a grammar that is complete ends even before the minimum length.
        """
        mask = self.ahead[drafted - 1] if drafted else self.mask
        if not forbidden:
            return mask
        rest = mask.copy()
        for token in forbidden:
            discard(rest, token)
        return rest if rest.any() else mask
