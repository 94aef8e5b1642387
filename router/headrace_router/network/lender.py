"""How much of a machine its owner lends now: nothing while it is paused, busy with other things, or its server is gone."""

from __future__ import annotations

import os
from collections.abc import Callable


def load() -> float:
    """Processes that run or want to, over the last minute."""
    return os.getloadavg()[0]


class Lender:
    """The will of a worker's owner."""

    def __init__(
        self, slots: int, pause_above_load: float | None = None, load: Callable[[], float] = load,
        available: Callable[[], bool] = lambda: True, free_tokens: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`slots`: most jobs at once; `available`: does what runs them answer? `free_tokens`: of its KV cache, if known."""
        self.slots, self.paused, self.free_tokens = slots, False, free_tokens
        self._limit, self._load, self._available = pause_above_load, load, available

    @property
    def reason(self) -> str | None:
        """Why no new jobs are taken; None: they are."""
        if self.paused:
            return "paused"
        if not self._available():
            return "the upstream does not answer"
        if self._limit is not None and (now := self._load()) > self._limit:
            return f"the machine's load is {now:.1f}, above {self._limit:g}"
        return None

    @property
    def capacity(self) -> int:
        """Jobs that may run at once now. Those that run already are never stopped."""
        return 0 if self.reason is not None else self.slots
