"""How long the service needs for a call, and so after how many seconds a refused one may come back."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

SHARE = 0.1  # weight of the last one in a mean
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


class Drain:
    """How fast those leave who wait in a line, learnt while there is one."""

    def __init__(self) -> None:
        self.gap = 0.0  # mean seconds from one that leaves to the next
        self._since: float | None = None  # when the last one left, or the first one came

    def begin(self, now: float) -> None:
        """Somebody waits, after a time when nobody did."""
        self._since = now

    def left(self, count: int, now: float, *, more: bool) -> None:
        """So many have left together; `more`: others wait still."""
        if self._since is not None:
            share = 1 - (1 - SHARE) ** count
            self.gap += share * ((now - self._since) / count - self.gap)
        self._since = now if more else None


@dataclass
class _Record:
    """What the requests of a class took: the better tenth (`low`), and all of them (`mean`)."""

    seen: int = 0
    low_share: float = 1.0  # of the tokens that it may produce, that a request does produce
    mean_share: float = 1.0
    low_token: float = 0.0  # seconds
    mean_tokens: float = 0.0
    mean_stay: float = 0.0  # seconds that a request keeps its place


class Forecast:
    """What requests will take once they have a place, by class, learnt from those that have ended."""

    def __init__(self) -> None:
        self._records: defaultdict[str, _Record] = defaultdict(_Record)

    def ended(self, workload: str, most: int, tokens: int, seconds: float) -> None:
        """A request has ended well that had a place for so many seconds, and has given `tokens` of at most `most`."""
        record, share = self._records[workload], tokens / most
        record.low_share = _low(record.low_share, share)
        record.mean_share = _mean(record.mean_share, share)
        record.mean_tokens = _mean(record.mean_tokens, tokens) if record.seen else tokens
        record.mean_stay = _mean(record.mean_stay, seconds) if record.seen else seconds
        if tokens >= LEAST:
            record.low_token = _low(record.low_token or seconds / tokens, seconds / tokens)
        record.seen += 1

    def cut(self, workload: str, most: int, seconds: float) -> None:
        """A request has been ended by its deadline, so long after it got its place: it would have taken longer."""
        record = self._records[workload]
        if record.seen:
            seconds -= (record.mean_share * most - record.mean_tokens) * record.low_token
            record.mean_stay = max(record.mean_stay, _mean(record.mean_stay, seconds))
        else:
            record.mean_tokens, record.mean_stay = most, seconds
        record.seen += 1

    def rest(self, workload: str, most: int, least: int) -> float:
        """Seconds from a request's first token to its end, if all goes well."""
        record = self._records[workload]
        tokens = max(record.low_share * most, least) - 1
        return max(tokens, 0) * record.low_token if record.seen >= ENOUGH else 0.0

    def stay(self, workload: str, most: int, least: int) -> float:
        """Seconds that a request keeps its place: what others of its class do, and so many tokens more or less."""
        record = self._records[workload]
        tokens = max(record.mean_share * most, least)
        stay = record.mean_stay + (tokens - record.mean_tokens) * record.low_token
        return max(stay, 0.0) if record.seen >= ENOUGH else 0.0


def _mean(estimate: float, sample: float) -> float:
    return estimate + SHARE * (sample - estimate)


def _low(estimate: float, sample: float) -> float:
    """A low expectile, one sample further."""
    return estimate + (LOW if sample < estimate else HIGH) * (sample - estimate)
