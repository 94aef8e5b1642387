"""Who is next: start-time fair queueing over tokens (Goyal et al., 1996), with the correction of the virtual token counter
(Sheng et al., OSDI 2024).

A job's score is the virtual time at which its flow may have it; the lowest score is next. A flow with twice the weight
gets twice the tokens while both have jobs. Scores never change, so that a position is exact, and a job that comes back
is before all that came after it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

Key = tuple[float, int, str]  # (score, arrival, job)


class FairQueue:
    """Scores of jobs, and those that wait in order."""

    def __init__(self) -> None:
        self._ready: list[Key] = []
        self._finish: dict[str, float] = {}  # virtual time at which each flow's last job ends
        self._now = 0.0  # score of the last job that was taken
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[str]:
        """Waiting jobs, the next one first."""
        return (key[2] for key in self._ready)

    def score(self, job: str, flow: str, cost: float) -> Key:
        """The place of a new job; `cost` in tokens by the flow's weight."""
        self._arrivals += 1
        start = max(self._now, self._finish.get(flow, 0.0))
        self._finish[flow] = start + cost
        return start, self._arrivals, job

    def push(self, key: Key) -> None:
        """Have a job wait, or wait again."""
        bisect.insort(self._ready, key)

    def take(self, key: Key) -> None:
        """A waiting job is handed out."""
        self.drop(key)
        self._now = max(self._now, key[0])

    def drop(self, key: Key) -> None:
        """A waiting job waits no longer."""
        del self._ready[self.position(key)]

    def position(self, key: Key) -> int:
        """How many are before a waiting job."""
        return bisect.bisect_left(self._ready, key)

    def correct(self, flow: str, difference: float) -> None:
        """A job of the flow has taken so much more (less, if negative) than it was charged."""
        if (finish := self._finish.get(flow)) is not None:
            self._finish[flow] = finish + difference
            if self._finish[flow] <= self._now:
                del self._finish[flow]  # who has taken no more than others is not remembered
