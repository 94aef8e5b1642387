"""How fast workers are, and so how long a request waits."""

from __future__ import annotations

import math

MEMORY = 10.0  # seconds of work after which what was measured counts 1/e
SHARE = 0.1  # weight of the last request in the mean


class Speed:
    """Tokens a second, prompts included, while there is work: a mean in which the last seconds count most."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def worked(self, tokens: int, seconds: float) -> None:
        """So many tokens were made in so long."""
        left = math.exp(-seconds / MEMORY)
        self._seconds = self._seconds * left + seconds
        self._tokens = self._tokens * left + tokens

    @property
    def value(self) -> float:
        """0 as long as nothing is known."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class Use:
    """The part of the tokens that it may grow to, that a request does use."""

    __slots__ = ("share",)

    def __init__(self) -> None:
        self.share = 1.0

    def ended(self, used: int, most: int) -> None:
        """A request has ended well with `used` of `most` tokens."""
        self.share += SHARE * (used / most - self.share)
