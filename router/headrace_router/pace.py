"""How long the service needs for a call, and so after how many seconds a refused one may come back."""

from __future__ import annotations

SHARE = 0.1  # weight of the last call in the mean
LONGEST = 60.0


class Pace:
    """A running mean of how long calls take, and a line of those that were turned away.

    With N calls at work that take D seconds each, one ends every D / N seconds. The k-th client that is turned away
    since then is told to come for the k-th of the places that get free, so that not all come back at once.
    """

    def __init__(self) -> None:
        self._seconds: float | None = None  # a call
        self._turned_away = 0

    def ended(self, seconds: float) -> None:
        """A call has ended well after so many seconds."""
        self._seconds = seconds if self._seconds is None else self._seconds + SHARE * (seconds - self._seconds)
        self._turned_away = max(self._turned_away - 1, 0)

    def retry_after(self, active: int) -> float:
        """Turn a client away while `active` calls are at work: seconds until there may be a place for it."""
        self._turned_away += 1
        if self._seconds is None:
            return 1.0
        return min(self._turned_away * self._seconds / max(active, 1), LONGEST)
