"""What the way over a gateway costs: one machine served directly, and lent to a gateway on the same machine.

A worker is a whole server, so that both ways end in one process with one batch: its own port is the direct one. Rounds of
both alternate, and which goes first alternates too. Each stream asks for the same number of tokens.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from bench.figures import Figure, Result
from bench.processes import cpu_between, cpu_seconds, embedded_model
from bench.raw_streams import Crowd
from headrace_launcher.bench.stats import median
from tests.networks import Network

TOKENS = {1: 96, 8: 64, 32: 32}  # of each stream, by the number of streams
ROUNDS = 3
SHARE = 0.9  # of direct throughput that must be left
PROMPT = "The wheel of a water mill turns because"


def measure() -> Result:
    """Run all measurements."""
    result = Result("network", setup={"tokens": TOKENS, "rounds": ROUNDS, "prompt": PROMPT, "broker": "memory://"})
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        quiet = ("--log-level", "warning")
        with Network(embedded_model(), Path(folder), quiet, quiet) as net:
            net.start(1)
            direct = net.workers[0].url
            uvloop.run(throughput(direct, 8, 16))
            for streams, tokens in TOKENS.items():
                _compare(result, net, direct, streams, tokens)
    return result


def _compare(result: Result, net: Network, direct: str, streams: int, tokens: int) -> None:
    urls = {"direct": direct, "gateway": net.url}
    rates: dict[str, list[float]] = {name: [] for name in urls}
    spent: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(ROUNDS):
        for name in sorted(urls, reverse=bool(number % 2)):
            before = _cpu(net)
            rates[name].append(uvloop.run(throughput(urls[name], streams, tokens)))
            spent[name].append(cpu_between(before, _cpu(net)) / (streams * tokens) * 1e6)
    shares = [lent / own for lent, own in zip(rates["gateway"], rates["direct"], strict=True)]
    what = f"{streams} stream{'s' * (streams > 1)}"
    result.figures += [
        Figure(f"gateway's share of direct throughput, {what}", "", median(shares), at_least=SHARE, samples=tuple(shares)),
        *(Figure(f"{name}, {what}", "tokens/s", median(found), samples=tuple(found)) for name, found in rates.items()),
        *(Figure(f"CPU, model included, {name}, {what}", "us/token", median(found), samples=tuple(found))
          for name, found in spent.items()),
    ]


def _cpu(net: Network) -> dict[int, float]:
    """CPU seconds of the gateway's and the worker's processes."""
    return {**cpu_seconds(net.gateway.popen.pid), **cpu_seconds(net.workers[0].popen.pid)}


async def throughput(url: str, streams: int, tokens: int) -> float:
    """Tokens a second of so many streams that begin at once, from the first request to the last token.

    Raises:
        RuntimeError: a stream is not whole.
    """
    body = {"model": "default", "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    begun = time.perf_counter()
    answers = await Crowd(streams).post(address.hostname, address.port, "/v1/completions", json.dumps(body).encode())
    seconds = time.perf_counter() - begun
    for answer in answers:
        if answer.status != 200 or b"[DONE]" not in answer.chunks[-1] + b"".join(answer.chunks[-2:-1]):
            raise RuntimeError(f"{url} answers {answer.status}: {b''.join(answer.chunks)[-300:]!r}")
    await asyncio.sleep(0.05)  # the slots are free
    return streams * tokens / seconds
