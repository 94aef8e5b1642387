"""What the gRPC boundary and the router cost, with a shard that costs as little as one can.

The scripted shard's steps end at absolute deadlines of 1 ms, so 64 requests make 64,000 tokens per second, and 256 requests
256,000, if nobody holds it up. Its tokens are counted at two places: behind the boundary, where the router's Batcher has put
them into its streams (`bench.receiver`), and, as information, at 64 clients of a whole router that reads the same shard.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench.figures import Figure, Result
from bench.processes import RouterProcess, ScriptedShard, cpu_between, cpu_seconds
from headrace_launcher.bench import load
from headrace_launcher.bench.stats import median
from tests.models import write_tiny_model

REQUESTS, MANY = 64, 256
STEP_MS = 1.0
TOKENS = 1000  # of each request: a round lasts a second
ROUNDS = 5
HTTP_TOKENS = 500
PROMPT = "sixteen letters!"


@dataclass(frozen=True)
class Cost:
    """Rates of some rounds, and the CPU time of a token in each process (microseconds)."""

    rates: list[float]
    cpu_us: dict[str, float]


def measure() -> Result:
    """Run both measurements."""
    result = Result("boundary", setup={
        "requests": [REQUESTS, MANY], "step_ms": STEP_MS, "tokens_per_request": TOKENS, "http_tokens_per_request": HTTP_TOKENS,
        "rounds": ROUNDS,
    })
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = write_tiny_model(Path(name))
        shard = ScriptedShard(folder, STEP_MS)
        try:
            grpc, full_batch = (at_batcher(shard, folder, requests) for requests in (REQUESTS, MANY))
            http = at_clients(shard, folder)
        finally:
            shard.stop()
    most = 1000 / STEP_MS
    result.figures = [
        Figure(
            "tokens at the gRPC boundary", "tokens/s", median(grpc.rates), at_least=0.9 * REQUESTS * most,
            samples=tuple(grpc.rates),
        ),
        Figure(
            "the same of 256 requests", "tokens/s", median(full_batch.rates), at_least=0.9 * MANY * most,
            samples=tuple(full_batch.rates),
        ),
        Figure("tokens at HTTP clients", "tokens/s", median(http.rates), samples=tuple(http.rates)),
        Figure("router CPU without HTTP", "us/token", grpc.cpu_us["router"]),
        Figure("router CPU with HTTP", "us/token", http.cpu_us["router"]),
    ]
    result.details = {
        "cpu_us_per_token": {"without HTTP": grpc.cpu_us, "256 requests": full_batch.cpu_us, "with HTTP": http.cpu_us},
    }
    return result


def at_batcher(shard: ScriptedShard, folder: Path, requests: int) -> Cost:
    """Tokens of so many requests that the router's Batcher receives."""
    before = cpu_seconds(shard.popen.pid)
    command = [
        sys.executable, "-m", "bench.receiver", "--target", shard.target, "--model-folder", str(folder),
        "--requests", str(requests), "--tokens", str(TOKENS), "--rounds", str(ROUNDS),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    spent = {"router": found["cpu_seconds"], "shard": cpu_between(before, cpu_seconds(shard.popen.pid))}
    return Cost(found["rates"], _per_token(spent, requests * TOKENS * ROUNDS))


def at_clients(shard: ScriptedShard, folder: Path) -> Cost:
    """Tokens that HTTP clients of /generate_stream read; the clients share the machine with all the rest."""
    router = RouterProcess(folder, shard.target, "--log-level", "warning").wait_ready()
    try:
        spec = load.Load(router.url, "tgi", concurrency=REQUESTS, output_len=HTTP_TOKENS)
        rates: list[float] = []
        tokens = 0
        pids = {"router": router.popen.pid, "shard": shard.popen.pid}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        for _ in range(ROUNDS):
            outcome = uvloop.run(load.run(spec, [PROMPT] * REQUESTS))
            if outcome.errors() or outcome.tokens != REQUESTS * HTTP_TOKENS:
                raise RuntimeError(f"{outcome.tokens} tokens, errors: {outcome.errors()}")
            rates.append(outcome.output_rate)
            tokens += outcome.tokens
        spent = {name: cpu_between(before[name], cpu_seconds(pid)) for name, pid in pids.items()}
    finally:
        router.stop()
    return Cost(rates, _per_token(spent, tokens))


def _per_token(spent: dict[str, float], tokens: int) -> dict[str, float]:
    return {name: round(seconds / tokens * 1e6, 2) for name, seconds in spent.items()}
