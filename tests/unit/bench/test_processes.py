"""CPU time of processes that come and go, and what their logs say."""

from __future__ import annotations

import pytest

from bench.processes import cpu_between, roofline
from headrace_shard.roofline import Roofline


def test_the_same_processes() -> None:
    assert cpu_between({1: 1.0, 2: 5.0}, {1: 1.5, 2: 5.25}) == 0.75


@pytest.mark.parametrize("after", [{1: 1.5}, {1: 1.5, 3: 0.0}, {1: 1.5, 2: 5.0, 3: 0.0}, {}])
def test_a_process_that_ended_or_came_makes_no_figure(after: dict[int, float]) -> None:
    with pytest.raises(RuntimeError, match="changed"):
        cpu_between({1: 1.0, 2: 5.0}, after)


def test_nothing_alive_is_no_idle_service() -> None:
    with pytest.raises(RuntimeError, match="changed"):
        cpu_between({}, {})


def test_the_roofline_is_read_from_the_shards_line() -> None:
    line = Roofline(("Q4_1", "Q8_0"), 96e6, 24.1e9)
    assert roofline(f"[shard 0] INFO ready\n[shard 0] INFO {line}\n") == 251
    with pytest.raises(LookupError):
        roofline(str(Roofline(("float32",), 96e6, 0.0)))
