"""The three workloads: requests of the kinds that servers really see, the same for the same seed.

| | what all share | a request's own | answer |
|---|---|---|---|
| chat | a system prompt of 64 tokens | 32 to 256 | 32 to 256 |
| agent | one of 4 long instructions of 1,500 | 64 to 512 | 16 to 128 |
| document | nothing | 1,000 to 4,000 | 128 to 512 |

Lengths are in tokens of usual vocabularies, about; reports have the server's own counts. They are drawn log-uniformly:
short ones are frequent.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace_launcher.bench.load import Job
from headrace_launcher.bench.prompts import numbered_list


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens; `targets` in milliseconds: what a request must keep to count as good."""

    shared: int
    groups: int  # of requests that share a beginning
    own: tuple[int, int]
    output: tuple[int, int]
    targets: dict[str, float]


@dataclass(frozen=True)
class Lengths:
    """What a request is made of, in tokens. `group`: whose beginning of `shared` tokens it has."""

    workload: str
    group: int
    shared: int
    own: int
    output: int


WORKLOADS = {
    "chat": Workload(64, 1, (32, 256), (32, 256), {"ttft": 1000, "tpot": 100}),
    "agent": Workload(1500, 4, (64, 512), (16, 128), {"ttft": 2000, "tpot": 200}),
    "document": Workload(0, 1, (1000, 4000), (128, 512), {"e2e": 120_000}),
}


def draw_lengths(
    mix: Sequence[str], count: int, seed: int, scale: float = 1.0, input_len: int | None = None, output_len: int | None = None
) -> list[Lengths]:
    """So many requests, of the workloads of the mix in turn by chance. `scale` shortens or lengthens all of them, `input_len`
    (then nothing is shared) and `output_len` are instead of what is drawn.
    """
    draw, drawn = random.Random(seed), []
    for _ in range(count):
        name = draw.choice(mix)
        kind = WORKLOADS[name]
        own, output = _between(draw, kind.own), _between(draw, kind.output)
        sizes = [max(1, round(n * scale)) for n in (own, output)]
        drawn.append(Lengths(name, draw.randrange(kind.groups), round(kind.shared * scale), *sizes))
    if input_len is not None:
        drawn = [replace(lengths, shared=0, own=input_len) for lengths in drawn]
    if output_len is not None:
        drawn = [replace(lengths, output=output_len) for lengths in drawn]
    return drawn


def _between(draw: random.Random, ends: tuple[int, int]) -> int:
    low, high = ends
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def make_prompt(lengths: Lengths, seed: int) -> str:
    """A text about as long as the lengths say, that no other seed gives but for its shared beginning."""
    shared = numbered_list(lengths.shared, -1 - lengths.group) if lengths.shared else ""
    return shared + numbered_list(lengths.own, seed)


def make_jobs(drawn: Sequence[Lengths], seed: int, at: Sequence[float] | None = None, tenants: int = 1) -> list[Job]:
    """The requests, with the seconds at which they arrive; the tenants take turns."""
    times = at if at is not None else [None] * len(drawn)
    return [
        Job(make_prompt(lengths, seed * 1_000_003 + i), lengths.output, lengths.workload, time, i % tenants)
        for i, (lengths, time) in enumerate(zip(drawn, times, strict=True))
    ]


def read_trace(path: Path) -> list[Job]:
    """The requests of a file of JSON lines: `at` (seconds), `output_tokens`, `prompt` or `input_tokens`, `workload` if any.

    Raises:
        ValueError: a line is not that; names it.
    """
    jobs = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row["prompt"] if "prompt" in row else numbered_list(int(row["input_tokens"]), number)
            job = Job(str(prompt), int(row["output_tokens"]), str(row.get("workload", "")), float(row["at"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: line {number}: {type(error).__name__}: {error}") from None
        if job.workload and job.workload not in WORKLOADS:
            raise ValueError(f"{path}: line {number}: workload {job.workload!r} is none of {', '.join(WORKLOADS)}")
        if unknown := set(row) - {"at", "output_tokens", "prompt", "input_tokens", "workload"}:
            raise ValueError(f"{path}: line {number}: {sorted(unknown)[0]} is not known")
        jobs.append(job)
    return jobs
