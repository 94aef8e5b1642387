"""The prompts that a shard has been given and has not computed yet, and whether it should get more.

A request in the shard can no longer be passed by a more urgent one, wait its tenant's turn, or be dropped before work on it
has begun. So a shard gets about as many prompt tokens as it computes in a moment, and the rest waits in the queue. As a
shard computes the prompts of urgent requests first, these do not wait for what others have there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

MOMENT = 0.5  # seconds
MEMORY = 2.0  # seconds after which what was learnt has lost most of its weight


class Prompt(Protocol):
    """What must be known of a request."""

    @property
    def begun(self) -> bool:
        """It has had a token since it was given to the shard, or has ended."""
        ...


P = TypeVar("P", bound=Prompt)


class Prompts(Generic[P]):
    """Those of one shard."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._there: dict[P, tuple[int, int]] = {}  # tokens and priority, of each that has not begun
        self._at = 0.0  # when they were last looked at
        self._computed = self._seconds = 0.0  # tokens, and the time that there were any; the older the less

    def add(self, request: P, tokens: int, priority: int) -> None:
        """The shard has been given a prompt."""
        if not self._there:
            self._at = self._clock()
        self._there[request] = tokens, priority

    def remove(self, request: P) -> None:
        """A request has left the shard, whether it has begun or not."""
        self._there.pop(request, None)

    def step(self) -> None:
        """The shard has made a step."""
        if not self._there:
            return
        begun = [request for request in self._there if request.begun]
        now = self._clock()
        elapsed, self._at = now - self._at, now
        fade = math.exp(-elapsed / MEMORY)
        self._seconds = self._seconds * fade + elapsed
        self._computed = self._computed * fade + sum(self._there.pop(request)[0] for request in begun)

    def may_add(self, priority: int) -> bool:
        """Should the shard be given a prompt of this priority now? The ones that it has of a lower one do not matter. It
        always has a next one beside the one that it computes, so that it need not wait for the router.
        """
        waiting = [tokens for tokens, other in self._there.values() if other >= priority]
        return len(waiting) < 2 or not self._computed or sum(waiting) < MOMENT * self._computed / self._seconds
