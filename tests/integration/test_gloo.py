"""Ranks over torch.distributed, as they are where there are no compiled kernels: the same collectives and the same ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

RANK = """
import sys, time, torch
from headrace_shard.parallel.distributed import DistributedGroup
from headrace_shard.parallel.group import GroupBroken

rank, place = int(sys.argv[1]), sys.argv[2]
group = DistributedGroup(rank, 3, place, torch.device("cpu"))
assert group.limit(2.0 + rank) == 2.0
assert group.sum(torch.full((2, 3), rank + 1.0), torch.ones(2, 3)).tolist() == [[7.0] * 3] * 2
halves = torch.ones(4 if rank == 1 else 2, 5)
assert group.sum(halves, None, (1, 3, 2)).tolist() == [[4.0] * 5] * 2
got = group.gather(torch.full((2, 1), float(rank)))
assert got.tolist() == ([[0.0, 1.0, 2.0]] * 2 if rank == 0 else [[float(rank)]] * 2)
assert group.broadcast(torch.tensor([rank + 5])).tolist() == [5]
print("ready", flush=True)
if rank == 2:
    time.sleep(100)
try:
    group.sum(torch.zeros(1))
except GroupBroken as error:
    print(error, flush=True)
"""


def test_collectives_and_a_rank_that_ends(tmp_path: Path) -> None:
    place = tmp_path / "meet"
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(place)], stdout=subprocess.PIPE, text=True, env=env)
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        assert not place.exists()
        ranks[2].send_signal(signal.SIGKILL)
        for number, rank in enumerate(ranks[:2]):
            assert rank.communicate(timeout=30)[0].startswith(f"rank {number} of 3 lost another rank: ")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
