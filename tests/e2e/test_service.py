"""The whole service on the embedded model: every way in at once, and nothing left when all have gone."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.v1 import generation_pb2 as pb
from tests.processes import Service

ROOT = Path(__file__).parents[2]
PROMPTS = ["The sky is", "Once upon a time", "def f(x):", "1 2 3 4", "Hello, my name is", "A", "Rain", "In 1999"]


@pytest.fixture(scope="module")
def running(service: Callable[..., Service]) -> Service:
    return service("--max-input-tokens", "512", "--max-total-tokens", "1024", "--max-concurrent-requests", "256")


@pytest.fixture
async def http(running: Service) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(running.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def events(http: aiohttp.ClientSession, prompt: str, n: int, **parameters: Any) -> list[dict[str, Any]]:
    """All events of one /generate_stream; every frame must be UTF-8 and JSON."""
    body = {"inputs": prompt, "parameters": {"max_new_tokens": n, **parameters}}
    async with http.post("/generate_stream", json=body) as reply:
        assert reply.status == 200, await reply.text()
        raw = await reply.read()
    frames = [f for f in raw.decode("utf-8").split("\n\n") if f and not f.startswith(":")]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def ids(stream: list[dict[str, Any]]) -> list[int]:
    return [e["token"]["id"] for e in stream]


async def test_a_direct_client_beside_eight_streams_changes_nothing(running: Service, http: aiohttp.ClientSession) -> None:
    alone = [await events(http, prompt, 16) for prompt in PROMPTS]
    command = [sys.executable, "examples/grpc_client.py", f"unix:{running.socket}", "The capital of France is", "16"]
    direct = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=True)
    stub = running.stub()

    async def clear() -> None:
        for _ in range(20):
            await asyncio.to_thread(stub.Clear, pb.ClearRequest())
            await asyncio.sleep(0.05)

    beside = asyncio.create_task(
        asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=True)
    )
    clearing = asyncio.create_task(clear())
    streams = await asyncio.gather(*(events(http, prompt, 16) for prompt in PROMPTS))
    again = await beside
    await clearing
    assert again.stdout == direct.stdout
    assert "Paris" in direct.stdout
    assert [ids(s) for s in streams] == [ids(s) for s in alone]


def test_reflection_is_enough_to_talk_to_a_shard(running: Service) -> None:
    target = f"unix:{running.socket}"

    def ask(*words: str) -> str:
        command = [sys.executable, "examples/reflect.py", target, *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "Decode(DecodeRequest) returns (stream Step)" in ask()
    assert json.loads(ask("Info"))["vocab_size"] == 49152
    request = {"requests": [{"id": 1, "text": "Hi", "return_text": True, "stopping": {"max_new_tokens": 1}}]}
    assert json.loads(ask("Prefill", json.dumps(request)).splitlines()[-1])["end"] == "FINISHED"


async def test_a_seeded_sample_is_the_same_alone_and_in_company(http: aiohttp.ClientSession) -> None:
    sampling = {"do_sample": True, "temperature": 1.3, "top_p": 0.95, "seed": 42}
    alone = await events(http, "My favourite place", 40, **sampling)
    together, *_ = await asyncio.gather(
        events(http, "My favourite place", 40, **sampling),
        *(events(http, p, 30, do_sample=True, temperature=1.5, seed=i) for i, p in enumerate(PROMPTS)),
    )
    assert ids(together) == ids(alone)


async def test_streams_of_hot_samples_are_whole_text(http: aiohttp.ClientSession) -> None:
    """Invariant: valid UTF-8 and JSON in every frame, and pieces that join to the final text."""
    streams = await asyncio.gather(
        *(events(http, "Emoji: 🙂", 48, do_sample=True, temperature=4.0, seed=seed) for seed in range(8))
    )
    for stream in streams:
        text = "".join(e["token"]["text"] for e in stream if not e["token"]["special"])
        assert stream[-1]["generated_text"] == text
        assert [e["generated_text"] for e in stream[:-1]] == [None] * (len(stream) - 1)


async def test_200_requests_with_random_disconnects_leave_nothing(running: Service, http: aiohttp.ClientSession) -> None:
    rng = random.Random(5)
    finished = []

    async def one(number: int) -> None:
        await asyncio.sleep(rng.uniform(0, 6))
        patience = rng.choice([0.01, 0.2, 0.7, 1.5, None])
        body = {"inputs": f"{rng.choice(PROMPTS)} {number}", "parameters": {"max_new_tokens": rng.randint(1, 12)}}
        path = rng.choice(["/generate", "/generate_stream"])
        try:
            async with asyncio.timeout(patience), http.post(path, json=body) as reply:
                await reply.read()
                assert reply.status == 200
                finished.append(number)
        except TimeoutError:
            pass

    await asyncio.gather(*(one(i) for i in range(200)))
    assert len(finished) > 20
    end = time.monotonic() + 10
    while running.metric("tgi_batch_current_size") or running.metric("tgi_queue_size"):
        assert time.monotonic() < end
        await asyncio.sleep(0.1)
    cache = free_blocks(running)
    assert cache.free_blocks == cache.blocks
    assert running.metric("tgi_request_count") >= 200


def free_blocks(running: Service) -> pb.Cache:
    """The pool as it is when only one request of one token runs, and has ended."""
    stub = running.stub()
    request = pb.Request(id=1, text="x", stopping=pb.Stopping(max_new_tokens=1))
    end = time.monotonic() + 10
    while True:
        cache: pb.Cache = list(stub.Prefill(pb.PrefillRequest(requests=[request])))[-1].cache
        if cache.free_blocks == cache.blocks or time.monotonic() > end:
            return cache
        time.sleep(0.2)


def test_the_router_stays_small_and_without_torch(running: Service) -> None:
    import psutil

    (router,) = [p for p in psutil.Process(running.popen.pid).children() if "headrace_router" in " ".join(p.cmdline())]
    assert router.memory_info().rss < 200e6
    assert not [m.path for m in router.memory_maps() if "libtorch" in m.path]


