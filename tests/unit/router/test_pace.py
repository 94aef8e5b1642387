"""What requests will take: nothing is said too early, drops are on the bright side, and lines are as fast as they were."""

from __future__ import annotations

import pytest

from headrace_router.pace import ENOUGH, LEAST, Drain, Forecast


def test_few_requests_say_nothing() -> None:
    forecast = Forecast()
    for _ in range(ENOUGH - 1):
        forecast.ended("chat", 100, 100, 10.0)
    assert (forecast.rest("chat", 100, 0), forecast.stay("chat", 100, 0)) == (0, 0)
    forecast.ended("chat", 100, 100, 10.0)
    assert forecast.rest("chat", 101, 0) == pytest.approx(10.0)
    assert forecast.stay("chat", 100, 0) == pytest.approx(10.0)
    assert forecast.stay("chat", 200, 0) == pytest.approx(20.0)
    assert forecast.stay("document", 200, 0) == 0  # a class knows only its own


def test_the_quicker_tenth_counts_for_what_is_left() -> None:
    forecast = Forecast()
    for n in range(500):
        forecast.ended("chat", 100, 100 if n % 4 else 20, 2.0 if n % 4 else 0.2)
    assert forecast.rest("chat", 100, 0) < 1.0  # of 0.2 and 2
    assert 1.0 < forecast.stay("chat", 100, 0) < 2.0
    assert forecast.rest("chat", 100, 100) > forecast.rest("chat", 100, 0)  # what must be produced will be


def test_short_answers_do_not_say_how_long_a_token_takes() -> None:
    forecast = Forecast()
    for _ in range(ENOUGH):
        forecast.ended("chat", LEAST, 1, 30.0)
    assert forecast.rest("chat", 1000, 1000) == 0
    assert forecast.stay("chat", 1000, 1000) == pytest.approx(30.0)


def test_a_line_is_as_fast_as_it_was_while_there_was_one() -> None:
    drain, now = Drain(), 0.0
    for _ in range(200):
        drain.begin(now)
        now += 1.0
        drain.left(2, now, more=True)
        now += 2.0
        drain.left(1, now, more=False)
        now += 100.0  # nobody waited
    assert drain.gap == pytest.approx(1.0, rel=0.2)  # three in three seconds


def test_what_was_cut_would_have_taken_longer() -> None:
    forecast = Forecast()
    for _ in range(ENOUGH):
        forecast.cut("document", 10, 4.0)
    assert forecast.stay("document", 10, 0) == pytest.approx(4.0)
    for _ in range(50):
        forecast.cut("document", 10, 8.0)
        forecast.cut("document", 10, 0.001)  # says nothing
    assert forecast.stay("document", 10, 0) == pytest.approx(8.0, rel=0.05)
