"""What requests will take: nothing is said too early, and the estimate is on the bright side."""

from __future__ import annotations

import pytest

from headrace_router.pace import ENOUGH, LEAST, Forecast


def test_few_requests_say_nothing() -> None:
    forecast = Forecast()
    for _ in range(ENOUGH - 1):
        forecast.ended(100, 100, 10.0)
    assert (forecast.rest(100, 0), forecast.wait(50, 1)) == (0, 0)
    forecast.ended(100, 100, 10.0)
    assert forecast.rest(101, 0) == pytest.approx(10.0)
    assert forecast.wait(6, 3) == pytest.approx(20.0)
    assert forecast.wait(6, 0) == 0


def test_the_quicker_tenth_counts() -> None:
    forecast = Forecast()
    for n in range(500):
        forecast.ended(100, 100 if n % 4 else 20, 2.0 if n % 4 else 0.2)
    assert forecast.rest(100, 0) < 1.0  # of 0.2 and 2
    assert forecast.wait(1, 1) < 1.0
    assert forecast.rest(100, 100) > forecast.rest(100, 0)  # what must be produced will be


def test_short_answers_do_not_say_how_long_a_token_takes() -> None:
    forecast = Forecast()
    for _ in range(ENOUGH):
        forecast.ended(LEAST, 1, 30.0)
    assert forecast.rest(1000, 1000) == 0
