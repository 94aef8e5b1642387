"""What the broker of a gateway can do alone: jobs from submission to their end, and tokens into logs that are being read.

Both brokers in one run: the one in memory, and the Valkey server of `--broker embedded` with its append-only file.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.figures import Figure, Result
from headrace._common.process import PARENT_ENV
from headrace_launcher import embedded
from headrace_launcher.bench.stats import median
from headrace_router.network.broker import Broker
from headrace_router.network.jobs import BEGINNING, Holder, Job, Policy, Progress
from headrace_router.network.memory import MemoryBroker
from headrace_router.network.shared import SharedBroker
from headrace_router.types import End, GenerateRequest, Token

CLIENTS = 8  # that submit one job after the other
STREAMS = 32  # jobs that get a token each in every step
PROMPT = 256  # tokens
SECONDS = 2.0  # of one round
ROUNDS = 5
JOBS, TOKENS, MEMORY = 300.0, 15_000.0, 5.0  # aims of the embedded broker a second; what the one in memory is above them

_POLICY = Policy(max_queue_size=10_000)
_END = End("length", "x", 1, PROMPT, None, 0, 0.0, 0.0)


def measure() -> Result:
    """Run both brokers, round by round."""
    result = Result("broker", setup={"clients": CLIENTS, "streams": STREAMS, "prompt": PROMPT, "seconds": SECONDS})
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        embedded.prepare(folder)
        server = subprocess.Popen(embedded.command(folder), env={**os.environ, PARENT_ENV: str(os.getpid())})
        try:
            found = asyncio.run(_measure(f"unix://{embedded.socket_of(folder)}"))
        finally:
            server.terminate()
            server.wait(10)
    for name, factor in (("memory", MEMORY), ("embedded", 1.0)):
        for what, aim in (("jobs", JOBS), ("logged tokens", TOKENS)):
            samples = found[f"{name}: {what}"]
            result.figures.append(Figure(
                f"{name}: {what}", "1/s", median(samples), at_least=aim * factor, samples=tuple(samples),
            ))
    return result


async def _measure(url: str) -> dict[str, list[float]]:
    kinds: tuple[tuple[str, Callable[[], Broker]], ...] = (
        ("memory", lambda: MemoryBroker(_POLICY)),
        ("embedded", lambda: SharedBroker(url, _POLICY, secrets.token_hex(4))),
    )
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for kind, make in kinds:
            found.setdefault(f"{kind}: jobs", []).append(await _with(make(), jobs_a_second))
            found.setdefault(f"{kind}: logged tokens", []).append(await _with(make(), tokens_a_second))
    return found


async def _with(broker: Broker, what: Callable[[Broker], Awaitable[float]]) -> float:
    await broker.start(10.0)
    try:
        await broker.attach(Holder("worker", "f32", 4096), lambda *_: None)
        return await what(broker)
    finally:
        await broker.close("the benchmark ends")


def _job() -> Job:
    return Job(secrets.token_hex(16), "bench/chat", 1.0, GenerateRequest(list(range(PROMPT)), 4096 - PROMPT))


async def jobs_a_second(broker: Broker) -> float:
    """Jobs of clients that wait for the end of each: submitted, followed, leased, ended with one token."""
    end = time.perf_counter() + SECONDS
    done = 0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < end:
            job, told = _job(), asyncio.Event()
            await broker.submit(job)
            await broker.subscribe(job.id, BEGINNING, lambda news, told=told: told.set() if news[-1].end else None)  # type: ignore[misc]
            await told.wait()
            done += 1

    async def worker() -> None:
        while True:
            leases = await broker.lease("worker", CLIENTS)
            news = [Progress(lease.job.id, lease.attempt, 0, [Token(7, -0.5, "x", False)], _END) for lease in leases]
            await (broker.progress(news) if news else asyncio.sleep(0))

    working = asyncio.create_task(worker())
    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    seconds = time.perf_counter() - began
    working.cancel()
    return done / seconds


async def tokens_a_second(broker: Broker) -> float:
    """Tokens of jobs that all get one in every step, each followed by a reader; a step waits until the last one is kept."""
    heard = 0

    def hear(news: object) -> None:
        nonlocal heard
        heard += 1

    jobs = [_job() for _ in range(STREAMS)]
    for job in jobs:
        await broker.submit(job)
        await broker.subscribe(job.id, BEGINNING, hear)
    leases = await broker.lease("worker", STREAMS)
    await asyncio.sleep(0.1)
    heard = index = 0
    began = time.perf_counter()
    while (seconds := time.perf_counter() - began) < SECONDS:
        await broker.progress([
            Progress(lease.job.id, lease.attempt, index, [Token(index, -0.5, " word", False)]) for lease in leases
        ])
        index += 1
    assert heard == index * STREAMS
    return heard / seconds
