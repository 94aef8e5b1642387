"""Rate limits of tenants: token buckets that fill at the allowed rate, and how long until they hold enough."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from headrace._common.errors import RateLimited
from headrace_router.pace import Pace
from headrace_router.tenants import Quota, Tenant


class Bucket:
    """Allows `per_minute` units a minute, so many at once. What was used beyond that is owed.

    https://en.wikipedia.org/wiki/Token_bucket
    """

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Units that are there; below 0 if more were used than allowed."""
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def wait(self, units: float, now: float) -> float:
        """Seconds until so many units are there, 0 if they are. A full bucket is enough for any number."""
        missing = min(units, self.per_minute) - self.level(now)
        return max(missing, 0.0) * 60 / self.per_minute

    def use(self, units: float, now: float) -> None:
        """Take units, whether they are there or not; negative ones are given back."""
        self._level = min(self.level(now) - units, self.per_minute)

    def resize(self, per_minute: int, now: float) -> None:
        """Allow another rate from now on; what was used stays used."""
        used = self.per_minute - self.level(now)
        self.per_minute, self._level = per_minute, per_minute - used


class Meter:
    """What one tenant uses, in calls and tokens."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._name = tenant.name
        self._quota = Quota()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._pace = Pace()
        self.active = 0  # calls
        self.adapt(tenant.quota)

    def adapt(self, quota: Quota) -> None:
        """The tenant's quota may have changed since its last request."""
        if quota != self._quota:
            self._quota, now = quota, self._clock()
            self._requests = _adapted(self._requests, quota.requests_per_minute, now)
            self._tokens = _adapted(self._tokens, quota.tokens_per_minute, now)

    def begin(self) -> None:
        """Count a call that arrives.

        Raises:
            RateLimited: the tenant has used what it may; says how long to wait.
        """
        most, now = self._quota.max_concurrent_requests, self._clock()
        if most is not None and self.active >= most:
            text = f"{self._name}: {self.active} requests are running, as many as allowed"
            raise RateLimited(text, "concurrency", self._pace.retry_after(self.active))
        if self._requests is not None and (seconds := self._requests.wait(1, now)):
            raise RateLimited(f"{self._name}: limit of {self._requests.per_minute} requests a minute", "requests", seconds)
        self._check_tokens(1, now)
        if self._requests is not None:
            self._requests.use(1, now)
        self.active += 1

    def end(self, seconds: float | None = None) -> None:
        """A call that began has ended; well, if `seconds` says how long it took."""
        self.active -= 1
        if seconds is not None:
            self._pace.ended(seconds)

    def charge(self, tokens: int) -> None:
        """Count tokens of a request that is to be admitted.

        Raises:
            RateLimited: there are too few left; nothing is counted.
        """
        self._check_tokens(tokens, self._clock())
        self.correct(tokens)

    def correct(self, tokens: int) -> None:
        """Count tokens that were used, or give back (negative) what was not."""
        if self._tokens is not None:
            self._tokens.use(tokens, self._clock())

    def _check_tokens(self, tokens: int, now: float) -> None:
        if self._tokens is not None and (seconds := self._tokens.wait(tokens, now)):
            raise RateLimited(f"{self._name}: limit of {self._tokens.per_minute} tokens a minute", "tokens", seconds)

    def headers(self) -> dict[str, str]:
        """OpenAI's x-ratelimit-… headers of the limits that there are.

        https://platform.openai.com/docs/guides/rate-limits
        """
        made, now = {}, self._clock()
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                made[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                made[f"x-ratelimit-remaining-{name}"] = str(max(int(bucket.level(now)), 0))
                made[f"x-ratelimit-reset-{name}"] = duration(bucket.wait(bucket.per_minute, now))
        return made


def _adapted(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


def duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{int(minutes)}m{rest:.0f}s" if minutes else f"{rest:.3g}s"


class Meters:
    """The meters of all tenants, by name: they outlive a reload of the table."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_name: dict[str, Meter] = {}

    def of(self, tenant: Tenant) -> Meter:
        """The tenant's meter, with its present quota."""
        meter = self._by_name.get(tenant.name)
        if meter is None:
            meter = self._by_name[tenant.name] = Meter(tenant, self._clock)
        meter.adapt(tenant.quota)
        return meter

    @contextlib.contextmanager
    def call(self, tenant: Tenant) -> Iterator[None]:
        """A call of the tenant, as long as it lasts.

        Raises:
            RateLimited: it may not begin now.
        """
        meter, begun, seconds = self.of(tenant), self._clock(), None
        meter.begin()
        try:
            yield
            seconds = self._clock() - begun
        finally:
            meter.end(seconds)
