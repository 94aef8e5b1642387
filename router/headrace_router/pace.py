"""How long the service needs for a call, and so after how many seconds a refused one may come back."""

from __future__ import annotations

SHARE = 0.1  # weight of the last call in the mean
LONGEST = 60.0
ENOUGH = 8  # ended requests from which on there is an estimate
LEAST = 16  # tokens of an answer that says how long a token takes
LOW, HIGH = 0.18, 0.02  # weights of samples below and above an estimate: about one in ten is better than that


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


class Forecast:
    """What requests will take at best, learnt from those that have ended: the better tenth of them."""

    def __init__(self) -> None:
        self._per_token = 0.0  # seconds
        self._share = 1.0  # of the tokens that it may produce, that a request does produce
        self._stay = 0.0  # seconds that a request keeps its place in the batch
        self._seen = 0

    def ended(self, most: int, tokens: int, seconds: float) -> None:
        """A request has ended well that had a place for so many seconds, and has given `tokens` of at most `most`."""
        self._share = _low(self._share, tokens / most)
        self._stay = _low(self._stay, seconds) if self._seen else seconds
        if tokens >= LEAST:
            self._per_token = _low(self._per_token or seconds / tokens, seconds / tokens)
        self._seen += 1

    def rest(self, most: int, least: int) -> float:
        """Seconds from the first token of a request to its end."""
        if self._seen < ENOUGH:
            return 0.0
        return max(self._share * most - 1, least - 1, 0) * self._per_token

    def wait(self, ahead: int, running: int) -> float:
        """Seconds until a place gets free for the one that comes after `ahead` others."""
        if self._seen < ENOUGH or not running:
            return 0.0
        return ahead * self._stay / running


def _low(estimate: float, sample: float) -> float:
    """A low expectile, one sample further."""
    return estimate + (LOW if sample < estimate else HIGH) * (sample - estimate)
