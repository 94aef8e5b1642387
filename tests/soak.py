"""`make soak`: many short requests of every kind with random cancels against the real service with a tiny model.

At the end memory must be flat, every counter back at zero, every permit and every KV block free.

    python tests/soak.py --requests 3000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headrace.v1 import generation_pb2 as pb
from tests.models import write_tiny_model
from tests.processes import Service

PERMITS = 48  # --max-concurrent-requests
CLIENTS = 32
FLAGS = (
    "--max-concurrent-requests", str(PERMITS), "--max-batch-size", "16", "--max-batch-total-tokens", "1024", "--speculate", "2",
    "--max-queue-size", "64", "--client-timeout", "10",
)
SAMPLES = 40  # of memory
GROWTH, SLACK = 1.03, 6e6  # of a process, from the second quarter of the run to the last: factor, and bytes
SETTLE_SECONDS = 15.0
LATE = {408, 503}  # where there is a deadline: it was missed, or by the forecast it would have been


def make_request(draw: random.Random) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Path, body and headers of a request of some kind."""
    text, tokens = "the mill " * draw.randrange(1, 12) + str(draw.randrange(50)), draw.randrange(1, 24)
    sampling: dict[str, Any] = {} if draw.random() < 0.5 else {"temperature": 0.9, "seed": draw.randrange(99)}
    headers = {"X-Headrace-Class": draw.choice(("chat", "agent", "document"))}
    if draw.random() < 0.05:
        headers["X-Request-Timeout-Ms"] = str(draw.randrange(1, 80))
    kind = draw.randrange(5)
    if kind < 2:
        parameters: dict[str, Any] = {"max_new_tokens": tokens, "details": draw.random() < 0.5}
        parameters |= {**sampling, "do_sample": True} if sampling else {}
        if draw.random() < 0.1:
            parameters["grammar"] = {"type": "regex", "value": "[0-9]{3}-[a-f]+"}
        return ("/generate", "/generate_stream")[kind], {"inputs": text, "parameters": parameters}, headers
    body = {"model": "m", "max_tokens": tokens, "stream": draw.random() < 0.7, **sampling}
    if draw.random() < 0.2:
        body |= {"logit_bias": {"101": 60}, "max_tokens": 60}  # repeats itself: guesses are right
    if kind == 2:
        return "/v1/completions", {**body, "prompt": text, "n": draw.randrange(1, 3)}, headers
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}, headers


class Soak:
    """The clients, and what they saw."""

    def __init__(self, url: str, count: int, seed: int) -> None:
        self.url, self.count, self.draw = url, count, random.Random(seed)
        self.sent = 0
        self.seen: Counter[str] = Counter()
        self.unexpected: list[str] = []

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Send all of them."""
        await asyncio.gather(*(self._client(session) for _ in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while self.sent < self.count:
            self.sent += 1
            path, body, headers = make_request(self.draw)
            leave = self.draw.expovariate(50) if self.draw.random() < 0.3 else None  # seconds
            try:
                async with asyncio.timeout(leave):
                    async with session.post(self.url + path, json=body, headers=headers) as response:
                        data = await response.read()
            except TimeoutError:
                self.seen["left"] += 1
                continue
            self.seen[str(response.status)] += 1
            late = "X-Request-Timeout-Ms" in headers and (response.status in LATE or b"X-Request-Timeout-Ms" in data)
            if not late and (response.status != 200 or b'"error"' in data):
                self.unexpected.append(f"{path} {json.dumps(body)}: {response.status} {data[:300]!r}")


def numbers(text: str) -> dict[str, float]:
    """Metrics by name, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = re.sub(r"\{.*\}", "", line).partition(" ")
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def settle(session: aiohttp.ClientSession, url: str) -> list[str]:
    """Wait until nothing waits, runs or is at work; what is wrong if that does not come."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        async with session.get(url + "/metrics") as response:
            now = numbers(await response.text())
        gauges = ("tgi_queue_size", "headrace_queue_tokens", "tgi_batch_current_size", "tgi_batch_current_max_tokens")
        wrong = [f"{name} is {now[name]:g}" for name in gauges if now[name]]
        ended = now["tgi_request_success"] + now["tgi_request_failure"]
        if now["tgi_request_count"] != ended:
            wrong.append(f"{now['tgi_request_count']:g} requests came, {ended:g} ended")
        if not wrong or time.monotonic() > end:
            return wrong
        await asyncio.sleep(0.2)


async def check_permits(session: aiohttp.ClientSession, url: str) -> list[str]:
    """As many requests at once as there are permits: all must be served."""
    async def one() -> int:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 8}}
        async with session.post(url + "/generate", json=body) as response:
            return response.status

    found = Counter(await asyncio.gather(*(one() for _ in range(PERMITS))))
    return [] if found == {200: PERMITS} else [f"of {PERMITS} requests at once: {dict(found)}"]


def check_blocks(service: Service) -> list[str]:
    """A request of one token, whose step says how the KV pool is when it has left."""
    request = pb.Request(id=1, text="x", stopping=pb.Stopping(max_new_tokens=1))
    cache = list(service.stub().Prefill(pb.PrefillRequest(requests=[request], owner="soak"), timeout=30))[-1].cache
    held = cache.blocks - cache.free_blocks
    return [f"{held} of {cache.blocks} KV blocks are held"] if held else []


def check_memory(samples: Sequence[dict[str, float]]) -> list[str]:
    """Bytes of each process, from the second quarter of the samples to the last."""
    quarter, wrong = max(len(samples) // 4, 1), []
    for name in samples[0]:
        early, late = (
            sum(sample[name] for sample in part) / len(part) for part in (samples[quarter : 2 * quarter], samples[-quarter:])
        )
        print(f"{name}: {early / 1e6:.1f} MB in the second quarter, {late / 1e6:.1f} MB in the last")
        if late > early * GROWTH + SLACK:
            wrong.append(f"{name} has grown from {early / 1e6:.1f} to {late / 1e6:.1f} MB")
    return wrong


def memory(root: psutil.Process) -> dict[str, float]:
    """Resident bytes of the service's processes by module."""
    found = {}
    for process in (root, *root.children(recursive=True)):
        module = next((word for word in process.cmdline() if word.startswith("headrace_")), "")
        if module:
            found[module] = float(process.memory_info().rss)
    return found


async def soak(service: Service, count: int, seed: int) -> list[str]:
    """What is wrong after so many requests."""
    load, samples = Soak(service.url, count, seed), list[dict[str, float]]()
    root = psutil.Process(service.popen.pid)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        began = time.monotonic()
        task = asyncio.create_task(load.run(session))
        while not task.done():
            if load.sent >= len(samples) * count / SAMPLES:
                samples.append(memory(root))
            await asyncio.sleep(0.02)
        await task
        seconds = time.monotonic() - began
        print(f"{count} requests in {seconds:.0f} s ({count / seconds:.0f}/s): {dict(load.seen)}")
        wrong = load.unexpected[:5] + await settle(session, service.url)
        wrong += await check_permits(session, service.url) + await settle(session, service.url)
        async with session.get(service.url + "/metrics") as response:
            found = numbers(await response.text())
    for name in ("headrace_prefix_cache_hit_tokens", "headrace_draft_tokens", "tgi_request_late", "tgi_request_refused"):
        print(f"{name} {found.get(name, 0):g}")
    return wrong + check_blocks(service) + check_memory(samples)


def main() -> int:
    """The command. Exit status 1 if something is wrong."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder:
        service = Service("--model-id", str(write_tiny_model(Path(folder) / "model")), "--dtype", "float32", *FLAGS)
        try:
            wrong = asyncio.run(soak(service.wait_ready(), given.requests, given.seed))
        finally:
            status = service.stop()
        if status:
            wrong.append(f"the service ended with {status}")
        if wrong:
            print("\n".join(["wrong:", *wrong]))
            print("".join(f"{line}\n" for line in service.log().splitlines() if "INFO" not in line)[-3000:])
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
