"""Shared-memory collectives equal plain sums and concatenations, leave nothing behind, and end when a rank is lost.

The ranks are threads of this process: what they share, and how they wait for each other, is the same.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace._common.errors import StartupError
from headrace_shard.kernels import build as building
from headrace_shard.kernels.library import Library
from headrace_shard.kernels.recording import Recording
from headrace_shard.parallel import rendezvous, shared_memory
from headrace_shard.parallel.group import GroupBroken
from headrace_shard.parallel.shared_memory import SharedMemoryGroup

pytestmark = pytest.mark.skipif(
    building.compiler() is None and not building.library_path().exists(), reason="no compiler: gloo serves here"
)


@pytest.fixture(params=["spins", "sleeps"])
def waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have a core each, and ranks that have not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64 if request.param == "spins" else 1)))


def on_ranks(world_size: int, place: Path, run: Callable[[SharedMemoryGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: run(SharedMemoryGroup(rank, world_size, place, 1)), range(world_size)))


def part(seed: int, rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))


NAMES = ["sum", "onto", "room", "gather", "broadcast", "send"]
OPERATIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 69), st.integers(1, 70)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPERATIONS, st.integers(2, 4))
def test_collectives_in_any_order(
    waits: None, tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int, int]], world_size: int
) -> None:
    """Slots of 4 KiB, so that some parts fit and some go in pieces."""
    patch = pytest.MonkeyPatch()
    patch.setattr(shared_memory, "SLOT_BYTES", 4096)
    place = tmp_path_factory.mktemp("run") / "meet"

    def run(group: SharedMemoryGroup) -> None:
        for number, (name, rows, width) in enumerate(operations):
            rows += name != "gather"  # a step may have no row whose logits are wanted
            parts = [part(number, rank, rows, width) for rank in range(world_size)]
            mine, residual = parts[group.rank], part(number, 9, rows, width)
            if "room" in name:
                mine = group.room(rows, width).copy_(mine)
            if name == "send":
                message = np.random.default_rng(number).integers(0, 99, rows * width)
                if group.rank == 0:
                    group.send(message)
                else:
                    assert np.array_equal(group.receive(), message)
            elif name == "broadcast":
                assert torch.equal(group.broadcast(mine), part(number, 0, rows, width))
            elif "gather" in name:
                got = group.gather(mine)
                assert torch.equal(got, torch.cat(parts, -1) if group.rank == 0 else parts[group.rank])
            else:
                total = parts[0].clone()
                for other in parts[1:]:
                    total += other
                if name == "sum":
                    assert torch.equal(group.sum(mine), total)
                else:
                    assert torch.equal(group.sum(mine, residual), total + part(number, 9, rows, width))

    try:
        on_ranks(world_size, place, run)
    finally:
        patch.undo()
    assert list(place.parent.iterdir()) == []


@pytest.mark.parametrize("halves", [(1, 2), (1, 3, 2), (1, 1, 2), (3, 3), (2, 2)])
@pytest.mark.parametrize("rows", [3, 40])
def test_halves_are_summed_before_both(
    halves: tuple[int, ...], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 4096)
    parts = [
        [part(half, rank, rows, 33) if mine & half else torch.zeros(0) for half in (1, 2)] for rank, mine in enumerate(halves)
    ]
    both = [sum(p[half] for p in parts if len(p[half])) for half in (0, 1)]
    expected = both[0] + both[1] + part(7, 7, rows, 33)

    def run(group: SharedMemoryGroup) -> torch.Tensor:
        mine = torch.cat([p for p in parts[group.rank] if len(p)])
        room = group.room(*mine.shape).copy_(mine)
        assert torch.equal(group.sum(room, part(7, 7, rows, 33), halves), expected)
        return group.sum(mine, part(7, 7, rows, 33), halves)

    for got in on_ranks(len(halves), tmp_path / "meet", run):
        assert torch.equal(got, expected)


def test_a_step_without_logits_gathers_no_rows(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path / "meet", lambda group: group.gather(torch.zeros(0, 7)).shape) == [(0, 14), (0, 7)]


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    parts = [part(1, rank, 3, 5).bfloat16() for rank in range(3)]
    expected = (parts[0].float() + parts[1].float() + parts[2].float()).bfloat16()
    for got in on_ranks(3, tmp_path / "meet", lambda group: group.sum(parts[group.rank].clone())):
        assert torch.equal(got, expected)


def test_many_small_sums_on_too_few_cores(waits: None, tmp_path: Path) -> None:
    def run(group: SharedMemoryGroup) -> float:
        x = torch.zeros(4, 96)
        for number in range(1500):
            group.sum(group.room(4, 96).fill_(number % 7 + group.rank), x)
        return float(x.sum())

    expected = 4.0 * 96 * sum(3 * (number % 7) + 3 for number in range(1500))
    assert on_ranks(3, tmp_path / "meet", run) == [expected] * 3


def test_the_leaders_limit_holds_for_all(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path / "meet", lambda group: group.limit(7.0 + group.rank)) == [7.0, 7.0]


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("how", ["ends", "freezes"])
def test_a_lost_rank_is_named_by_all_others(who: int, how: str, tmp_path: Path) -> None:
    done = threading.Barrier(3)

    def run(group: SharedMemoryGroup) -> str:
        group.limit(1.0 if how == "freezes" else 60.0)
        if group.rank == who:
            if how == "ends":
                for peer in group._peers.values():  # as the end of its process does
                    peer.close()
            done.wait(30)
            return ""
        begun = time.monotonic()
        with pytest.raises(GroupBroken) as caught:
            group.sum(torch.zeros(8))
        assert time.monotonic() - begun < 10
        with pytest.raises(GroupBroken):
            group.broadcast(torch.zeros(8))
        done.wait(30)
        assert caught.value.lost
        return str(caught.value)

    reason = "has ended" if how == "ends" else "did not answer for 1 s"
    for rank, message in enumerate(on_ranks(3, tmp_path / "meet", run)):
        assert rank == who or message == f"rank {rank} of 3 lost another rank: rank {who} {reason}"


@pytest.mark.parametrize("how", ["ends", "freezes"])
def test_a_rank_lost_in_a_recorded_pass_ends_it(how: str, tmp_path: Path) -> None:
    """The pass has three sums, onto three rows; one rank comes to the first only."""
    done, library = threading.Barrier(3), Library()

    def run(group: SharedMemoryGroup) -> tuple[str, list[float]]:
        group.limit(1.0 if how == "freezes" else 60.0)
        rows, recording = torch.zeros(3, 96), Recording()
        for row in rows[: 1 if group.rank == 1 else 3]:
            recording.sum(None, row.data_ptr(), row.data_ptr(), 96)
        group.room(1, 96).fill_(1.0)
        calls = recording.calls()
        if group.rank == 1:
            group.run(lambda address: library.run(calls, 1, 0, address))
            if how == "ends":
                for peer in group._peers.values():
                    peer.close()
            done.wait(30)
            return "", rows[:, 5].tolist()
        with pytest.raises(GroupBroken) as caught:
            group.run(lambda address: library.run(calls, 1, 0, address))
        done.wait(30)
        return str(caught.value), rows[:, 5].tolist()

    reason = "has ended" if how == "ends" else "did not answer for 1 s"
    for rank, (message, rows) in enumerate(on_ranks(3, tmp_path / "meet", run)):
        assert rank == 1 or message == f"rank {rank} of 3 lost another rank: rank 1 {reason}"
        assert rows == [3.0, 0.0, 0.0]


# How they meet


def test_a_path_longer_than_a_sockets_may_be_and_a_left_over_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as dead, rendezvous._reachable(folder / "meet") as address:
        dead.bind(address)
    assert (folder / "meet").exists()
    assert on_ranks(2, folder / "meet", lambda group: group.limit(5.0)) == [5.0, 5.0]
    assert list(folder.iterdir()) == []


def test_ranks_of_another_group_are_refused_by_number(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(rendezvous.join, tmp_path / "meet", 1, 3, 20.0)
        with pytest.raises(StartupError, match="rank 1 of 3 does not fit into the shard group of 2"):
            rendezvous.host(tmp_path / "meet", 2, 0, 20.0)
        with pytest.raises(GroupBroken, match="rank 0 has ended"):
            other.result()
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="rank 0 of 3 did not meet the others, 1, 2, at "):
        rendezvous.host(tmp_path / "meet", 3, 0, 0.2)
    with pytest.raises(StartupError, match="rank 0 of the shard group cannot be met at "):
        rendezvous.join(tmp_path / "meet", 1, 3, 0.2)
    assert list(tmp_path.iterdir()) == []
