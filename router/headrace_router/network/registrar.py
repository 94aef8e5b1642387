"""Strangers register themselves: a token of tier open for each who asks, within limits of how many."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from headrace._common.errors import RateLimited
from headrace_router.network.tokens import WorkerTokens

HOUR = 3600.0
OF_ADDRESS = 5  # new tokens in an hour
OF_ALL = 100  # the same, of all addresses together: behind a proxy they are one
MOST = 10_000  # open tokens that count


class Registrar:
    """Gives tokens to strangers."""

    def __init__(self, tokens: WorkerTokens, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens, self._clock = tokens, clock
        self._given: deque[tuple[float, str]] = deque()  # in the last hour: when, and to which address

    def register(self, address: str) -> str:
        """A new token.

        Raises:
            RateLimited: this address, or all together, have had as many as they may.
        """
        now = self._clock()
        while self._given and self._given[0][0] <= now - HOUR:
            self._given.popleft()
        own = [when for when, whose in self._given if whose == address]
        if len(own) >= OF_ADDRESS:
            raise RateLimited(f"at most {OF_ADDRESS} workers an hour may register from here", retry_after=own[0] + HOUR - now)
        if len(self._given) >= OF_ALL:
            text = f"at most {OF_ALL} workers an hour may register"
            raise RateLimited(text, retry_after=self._given[0][0] + HOUR - now)
        if sum(row.tier == "open" and row.lapse is None for row in self._tokens.rows) >= MOST:
            raise RateLimited(f"{MOST} open workers are registered, and there may not be more", retry_after=HOUR)
        self._given.append((now, address))
        return self._tokens.create("registered", "open")
