"""What a streamed token costs the router, how many streams it carries, and what a chat costs before it is queued.

A scripted shard makes the tokens. CPU time is the router's alone, over the time in which every stream runs: admission and
the end of requests are not in it. How many events share a write is counted at the client.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import urllib.request
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from bench.figures import Figure, Result
from bench.processes import RouterProcess, ScriptedShard, cpu_between, cpu_seconds, rss_mb
from bench.raw_streams import Crowd, Stream
from headrace_launcher.bench.stats import median
from tests.fakes.text_models import write_text_model

STREAMS = 100
MANY = 1000
STEP_MS = 12.0
SHARED = 4  # tokens of a request in one step: their events share a write
ROUNDS = 3
MEGABYTES = 150.0
CHATS = 20
CHAT_ROUNDS = 9
WARM = 20


@dataclass(frozen=True)
class Cost:
    """Of one kind of load."""

    cpu_us: list[float]  # of a token, each round
    events_per_write: float
    rss_mb: float
    streams: list[Stream]  # of the last round


def measure() -> Result:
    """Run all measurements."""
    result = Result("streaming", setup={
        "streams": STREAMS, "step_ms": STEP_MS, "tokens_per_step": [1, SHARED], "rounds": ROUNDS, "many": MANY,
        "chat_messages": 20, "chats": CHATS, "chat_rounds": CHAT_ROUNDS,
    })
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = write_text_model(Path(name))
        single = stream_cost(folder, STREAMS, STEP_MS, 1, 400)
        chat = stream_cost(folder, STREAMS, STEP_MS, 1, 400, "chat")
        shared = stream_cost(folder, STREAMS, STEP_MS, SHARED, 1000)
        many = stream_cost(folder, MANY, 100.0, 1, 60)
        chats = chat_milliseconds(folder)
    failed = sum(stream.status != 200 or stream.events != 60 for stream in many.streams)
    result.figures = [
        Figure("router CPU, an event a write", "us/token", median(single.cpu_us), below=25.0, samples=tuple(single.cpu_us)),
        Figure("router CPU, an event a write, chat", "us/token", median(chat.cpu_us), samples=tuple(chat.cpu_us)),
        Figure("router CPU, four events a write", "us/token", median(shared.cpu_us), below=8.0, samples=tuple(shared.cpu_us)),
        Figure(f"failed streams of {MANY}", "streams", failed, below=0.5),
        Figure(f"router memory with {MANY} streams", "MB", many.rss_mb, below=MEGABYTES),
        Figure("a chat of 20 messages until it is queued", "ms", median(chats), below=1.0, samples=tuple(chats)),
    ]
    result.details = {"events_per_write": {
        "single": round(single.events_per_write, 2), "chat": round(chat.events_per_write, 2),
        "shared": round(shared.events_per_write, 2), "many": round(many.events_per_write, 2),
    }}
    return result


def stream_cost(
    folder: Path, streams: int, step_ms: float, tokens_per_step: int, tokens: int, api: str = "native"
) -> Cost:
    """The router's cost with so many streams of so many tokens."""
    size = ["--max-batch-size", str(streams), "--tokens-per-step", str(tokens_per_step)]
    shard = ScriptedShard(folder, step_ms, *size)
    try:
        router = RouterProcess(
            folder, shard.target, "--log-level", "warning", "--max-concurrent-requests", str(streams)
        ).wait_ready()
        try:
            return uvloop.run(_cost(router, streams, tokens, api))
        finally:
            router.stop()
    finally:
        shard.stop()


async def _cost(router: RouterProcess, streams: int, tokens: int, api: str) -> Cost:
    if api == "chat":
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True, "temperature": 0}
    else:
        path, body = "/generate_stream", {"inputs": "hello", "parameters": {"max_new_tokens": tokens}}
    raw, (host, port) = json.dumps(body).encode(), _address(router)
    costs, memory, found = [], 0.0, []
    for _ in range(ROUNDS):
        crowd = Crowd(streams)
        load = asyncio.create_task(crowd.post(host, port, path, raw))
        await crowd.all_begun.wait()
        before, at_begin = cpu_seconds(router.popen.pid), crowd.events
        memory = max(memory, rss_mb(router.popen.pid))
        await crowd.one_ended.wait()
        spent, events = cpu_between(before, cpu_seconds(router.popen.pid)), crowd.events - at_begin
        memory = max(memory, rss_mb(router.popen.pid))
        found = await load
        costs.append(spent / events * 1e6)
    events = sum(stream.events for stream in found)
    return Cost(costs, events / sum(len(stream.chunks) for stream in found), memory, found)


def chat_milliseconds(folder: Path) -> list[float]:
    """From arrival to the queue, by the router's own metric: body, checks, template, tokens; the mean of each round."""
    words = "the sky is blue and the sea is blue, one two three four five six; hello world"
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"{i} {words}"} for i in range(19)]
    body = json.dumps({"messages": [{"role": "system", "content": words}, *messages], "max_tokens": 1}).encode()
    shard = ScriptedShard(folder)
    try:
        router = RouterProcess(folder, shard.target, "--log-level", "warning").wait_ready()
        try:
            uvloop.run(_chats(router, body, WARM))
            spent = [_validation(router)]
            for _ in range(CHAT_ROUNDS):
                uvloop.run(_chats(router, body, CHATS))
                spent.append(_validation(router))
        finally:
            router.stop()
    finally:
        shard.stop()
    return [(after[0] - before[0]) / (after[1] - before[1]) * 1e3 for before, after in pairwise(spent)]


async def _chats(router: RouterProcess, body: bytes, count: int) -> None:
    host, port = _address(router)
    for _ in range(count):
        (answer,) = await Crowd(1).post(host, port, "/v1/chat/completions", body)
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}")


def _validation(router: RouterProcess) -> tuple[float, float]:
    """(seconds, requests) so far."""
    with urllib.request.urlopen(f"{router.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode()
    total, count = (
        float(re.findall(rf"^tgi_request_validation_duration_{part} (\S+)", lines, re.MULTILINE)[0])
        for part in ("sum", "count")
    )
    return total, count


def _address(router: RouterProcess) -> tuple[str, int]:
    address = urlsplit(router.url)
    assert address.hostname is not None
    assert address.port is not None
    return address.hostname, address.port
