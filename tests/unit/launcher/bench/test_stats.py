"""Percentiles of measured values."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_launcher.bench.stats import median, percentile, summary

values = st.lists(st.floats(-1e6, 1e6), min_size=1)


def test_neighbours_are_interpolated() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([0.0, 10.0], 90) == 9.0
    assert percentile([7.0], 99) == 7.0


@given(values)
def test_ends_and_middle(found: list[float]) -> None:
    assert percentile(found, 0) == min(found)
    assert percentile(found, 100) == max(found)
    assert percentile(found, 50) == pytest.approx(statistics.median(found)) == median(found)


@pytest.mark.parametrize(("found", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_what_has_no_percentile(found: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="no"):
        percentile(found, percent)


def test_summary() -> None:
    assert summary([]) is None
    assert summary([1.0, 2.0, 3.0]) == {"p50": 2.0, "p90": 2.8, "p99": 2.98}
