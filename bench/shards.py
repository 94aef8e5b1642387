"""Milliseconds a decode step takes over several shards, beside one process with as many threads as there are cores.

`python -m bench.shards`: the embedded model in its own weights, over shared memory and over gloo, and the microseconds of
one all-reduce of each. Best of several repeats, and median.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.kernels import CONTEXT, decode_step
from bench.machine import facts
from headrace._common.model_folder import ModelFolder
from headrace_launcher.bench.stats import median
from headrace_shard.loading import load, meet
from headrace_shard.parallel.distributed import DistributedGroup
from headrace_shard.parallel.group import Group
from headrace_shard.parallel.runner import Follower, Leader
from headrace_shard.settings import ShardSettings

ROWS = (1, 8, 32)
WIDTH = 576  # numbers a row of an all-reduce, as the embedded model has them
SUMS = 2000
TRANSPORTS = {
    "shared memory": meet,
    "gloo": lambda settings, rendezvous, device, threads: DistributedGroup(
        settings.rank, settings.num_shard, rendezvous, device
    ),
}


def all_reduce(group: Group, rows: int) -> float:
    """Microseconds of one all-reduce of [rows, WIDTH] onto a residual; the best of some runs. Every rank calls it."""
    residual, best = torch.zeros(rows, WIDTH), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(SUMS // 5):
            group.sum(group.room(rows, WIDTH), residual)
        best = min(best, (time.perf_counter() - begin) / (SUMS // 5) * 1e6)
    return best


def steps(leader: Leader, rows: int, vocab: int, seconds: float) -> list[float]:
    """Milliseconds of each decode step of so many sequences, for about so many seconds."""
    step = decode_step(rows, CONTEXT, vocab)
    times: list[float] = []
    leader.forward(step)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        leader.forward(step)
        times.append((time.perf_counter() - begin) * 1000)
    return times


def one_rank(folder: str, rank: int, shards: int, threads: int, transport: str, place: str, seconds: float) -> None:
    """The process of one rank; rank 0 prints what it has measured."""
    settings = ShardSettings(
        model_folder=folder, rank=rank, num_shard=shards, threads=threads, max_batch_total_tokens=32 * 256,
        max_total_tokens=4096,
    )
    loaded = load(settings, ModelFolder.open(Path(folder)), place, TRANSPORTS[transport])
    with torch.inference_mode():
        sums = {rows: all_reduce(loaded.group, rows) for rows in ROWS} if shards > 1 else {}
        if rank:
            follower = Follower(loaded.model, loaded.group, loaded.step_deadline)
            follower.start()
            while follower.trouble() is None:
                time.sleep(0.1)
            return
        leader = Leader(loaded.model, loaded.group)
        times = {rows: steps(leader, rows, loaded.model.vocab_size, seconds) for rows in ROWS}
        if shards > 1:
            leader.stop()
    best, middle = {r: min(t) for r, t in times.items()}, {r: median(t) for r, t in times.items()}
    print(json.dumps({"sums": sums, "best": best, "median": middle}))


def measure(folder: str, shards: int, threads: int, transport: str, seconds: float) -> dict[str, dict[str, float]]:
    """Run a group and return what its leader says."""
    with tempfile.TemporaryDirectory() as private:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.shards", "--rank", f"{rank} {private}/meet", "--model-folder", folder,
                 "--shards", str(shards), "--threads", str(threads), "--transport", transport, "--seconds", str(seconds)],
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(shards)
        ]
        said = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"{shards} shards over {transport} failed")
    found: dict[str, dict[str, float]] = json.loads(said[0].splitlines()[-1])
    return found


def line(name: str, found: dict[str, dict[str, float]], alone: dict[str, float]) -> str:
    """One row of the table."""
    cells = [
        f"{found['best'][r]:7.2f} / {found['median'][r]:7.2f} ms {alone[r] / found['best'][r]:4.2f}" for r in map(str, ROWS)
    ]
    sums = "  ".join(f"{found['sums'][str(r)]:6.1f}" for r in ROWS) if found["sums"] else ""
    return f"{name:38}{'   '.join(cells)}   {sums}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.shards", description=__doc__)
    parser.add_argument("--model-folder", help="a model folder; the embedded model's if not given")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each figure")
    parser.add_argument("--shards", type=int, action="append", help="may be repeated; 2 and 3 if not given")
    parser.add_argument("--transport", choices=TRANSPORTS, help="both if not given")
    parser.add_argument("--threads", type=int, help="of a shard; its part of the cores if not given")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank, place = given.rank.split(" ", 1)
        one_rank(given.model_folder, int(rank), given.shards[0], given.threads, given.transport, place, given.seconds)
        return
    folder = given.model_folder or subprocess.run(
        [sys.executable, "-c", "from headrace_launcher.cli import main; main()", "resolve"],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout.splitlines()[-1]
    machine: dict[str, Any] = facts()
    cores = len(os.sched_getaffinity(0))
    print(f"{machine['cpu']}, {cores} cores, load {machine['load_before']}; context {CONTEXT}")
    print("best / median ms of a step that decodes so many sequences, speed beside 1 shard, us of an all-reduce of such rows")
    print(f"{'':38}" + "   ".join(f"{rows:<27}" for rows in ROWS) + "   " + "  ".join(f"{rows:6}" for rows in ROWS))
    one = measure(folder, 1, cores, "shared memory", given.seconds)
    print(line(f"1 shard, {cores} threads", one, one["best"]), flush=True)
    for shards in given.shards or (2, 3):
        threads = given.threads or max(1, cores // shards)
        for transport in [given.transport] if given.transport else TRANSPORTS:
            found = measure(folder, shards, threads, transport, given.seconds)
            print(line(f"{shards} shards, {threads} thread(s), {transport}", found, one["best"]), flush=True)


if __name__ == "__main__":
    main()
