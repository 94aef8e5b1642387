"""Token buckets and the meters of tenants, on a clock of their own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._common.errors import RateLimited
from headrace_router.pace import LONGEST, Pace
from headrace_router.rates import Bucket, Meter, Meters, duration
from headrace_router.tenants import Quota, Tenant


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_at_its_rate() -> None:
    bucket = Bucket(60, 0.0)
    bucket.use(60, 0.0)
    assert bucket.wait(1, 0.0) == pytest.approx(1)
    assert bucket.wait(30, 0.0) == pytest.approx(30)
    assert bucket.level(10.0) == pytest.approx(10)
    assert bucket.level(1000.0) == 60


def test_what_is_used_beyond_the_limit_is_owed() -> None:
    bucket = Bucket(60, 0.0)
    bucket.use(90, 0.0)
    assert bucket.wait(1, 0.0) == pytest.approx(31)
    bucket.use(-45, 0.0)
    assert bucket.wait(1, 0.0) == 0


def test_a_full_bucket_is_enough_for_anything() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.wait(1000, 0.0) == 0
    bucket.use(1000, 0.0)
    assert bucket.wait(1000, 0.0) == pytest.approx(1000)


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 200)), max_size=60))
def test_no_more_is_let_through_than_allowed(rate: int, arrivals: list[tuple[float, int]]) -> None:
    """Over any time: a full bucket at the start, the rate after that, and at most one request too large for it."""
    bucket, now, used, largest = Bucket(rate, 0.0), 0.0, 0, 0
    for pause, units in arrivals:
        now += pause
        seconds = bucket.wait(units, now)
        assert bucket.wait(units, now + seconds) == pytest.approx(0, abs=1e-6)
        if not seconds:
            bucket.use(units, now)
            used, largest = used + units, max(largest, units)
    assert used <= rate + rate * now / 60 + largest + 1e-6


def meter(**limits: int) -> tuple[Meter, Clock]:
    clock = Clock()
    return Meters(clock).of(Tenant("t", quota=Quota(**limits))), clock


def test_requests_per_minute() -> None:
    counted, clock = meter(requests_per_minute=2)
    counted.begin()
    counted.begin()
    with pytest.raises(RateLimited) as caught:
        counted.begin()
    assert caught.value.reason == "requests"
    assert caught.value.retry_after == pytest.approx(30)
    assert counted.active == 2
    clock.now += 30.001
    counted.begin()


def test_concurrent_requests() -> None:
    counted, _ = meter(max_concurrent_requests=1)
    counted.begin()
    with pytest.raises(RateLimited) as caught:
        counted.begin()
    assert caught.value.reason == "concurrency"
    counted.end()
    counted.begin()


def test_tokens_are_charged_and_corrected() -> None:
    counted, clock = meter(tokens_per_minute=600)
    counted.charge(500)
    with pytest.raises(RateLimited) as caught:
        counted.charge(200)
    assert caught.value.reason == "tokens"
    assert caught.value.retry_after == pytest.approx(10)
    counted.correct(400)  # 300 owed
    with pytest.raises(RateLimited):
        counted.begin()
    assert counted.active == 0
    clock.now += 30.2
    counted.begin()


def test_a_refused_call_costs_no_request() -> None:
    counted, clock = meter(requests_per_minute=60, tokens_per_minute=60)
    counted.correct(90)
    with pytest.raises(RateLimited):
        counted.begin()
    assert counted.headers()["x-ratelimit-remaining-requests"] == "60"
    clock.now += 1


def test_headers_name_the_limits_that_there_are() -> None:
    assert meter()[0].headers() == {}
    counted, _ = meter(requests_per_minute=60, tokens_per_minute=6000)
    counted.begin()
    counted.charge(9000)
    assert counted.headers() == {
        "x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59", "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000", "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1m30s",
    }


@pytest.mark.parametrize(("seconds", "text"), [(0, "0ms"), (0.02, "20ms"), (1.5, "1.5s"), (59, "59s"), (360, "6m0s")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_another_quota_keeps_what_was_used() -> None:
    clock = Clock()
    meters = Meters(clock)
    meters.of(Tenant("t", quota=Quota(requests_per_minute=10))).begin()
    changed = meters.of(Tenant("t", quota=Quota(requests_per_minute=5, tokens_per_minute=7)))
    assert changed.headers()["x-ratelimit-remaining-requests"] == "4"
    assert changed.headers()["x-ratelimit-remaining-tokens"] == "7"
    assert changed.active == 1
    assert meters.of(Tenant("t")).headers() == {}


def test_a_call_ends_however_it_ends() -> None:
    meters, tenant = Meters(Clock()), Tenant("t", quota=Quota(max_concurrent_requests=1))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), meters.call(tenant):
            raise ZeroDivisionError
    assert meters.of(tenant).active == 0


def test_clients_are_turned_away_for_as_long_as_it_takes() -> None:
    pace = Pace()
    assert pace.retry_after(1) == 1.0
    pace = Pace()
    pace.ended(20.0)
    assert [pace.retry_after(10) for _ in range(3)] == [2.0, 4.0, 6.0]
    pace.ended(20.0)
    assert pace.retry_after(10) == 6.0
    assert pace.retry_after(0) == LONGEST
