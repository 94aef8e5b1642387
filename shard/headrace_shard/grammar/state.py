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
    """

    __slots__ = ("busy", "error", "grammar", "late", "mask", "matcher")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.busy, self.late = True, False
        self.error: str | None = None
        self.matcher: llguidance.LLMatcher | None = None
        self.mask = none_of(0)

    @property
    def sits_out(self) -> bool:
        """Whether the row has to miss steps: others must not wait for its mask."""
        return self.late and self.busy

    def allowed(self, forbidden: Sequence[int]) -> Bits:
        """The mask without tokens that may not be chosen yet, unless nothing else may follow: a grammar that is
        complete ends even before the minimum length.
        """
        if not forbidden:
            return self.mask
        rest = self.mask.copy()
        for token in forbidden:
            discard(rest, token)
        return rest if rest.any() else self.mask
