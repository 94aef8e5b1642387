"""Strangers begin on probation: probes, one at a time, and nothing else until some in a row were answered as a worker would.

A probe is a job like any other in what a worker sees. What is looked at is its form alone: tokens of the vocabulary, in order,
not more than asked for, at a speed that is possible. It does not show that the answers are the model's.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence

from headrace._common.errors import QueueFull
from headrace._common.tokenizing import Tokenizer
from headrace_router.network.broker import Broker
from headrace_router.network.jobs import BEGINNING, PROBATION, TERMINAL, Event, Job
from headrace_router.types import GenerateRequest

PROBES = 3
TOKENS = (16, 48)  # of a probe's answer, at least and at most
PROBE_SECONDS = 60.0
AGAIN_SECONDS = 1.0  # to wait when the queue is full
FASTEST = 50_000.0  # tokens a second that no machine produces for one request
_SUBJECTS = ("The history of", "A short story about", "How to repair", "Three facts about", "Why people like", "A letter to")
_OBJECTS = ("the sea", "old bridges", "a bicycle", "winter", "my neighbour", "the railway", "bread", "a lighthouse", "music")


def make_probe(tokenizer: Tokenizer) -> GenerateRequest:
    """A request that nobody waits for."""
    text = f"{random.choice(_SUBJECTS)} {random.choice(_OBJECTS)}"
    return GenerateRequest(tokenizer.encode(text), random.randint(*TOKENS), workload=random.choice(("chat", "document")))


async def probe(broker: Broker, session: str, request: GenerateRequest) -> str | None:
    """Have a session answer a request; says what was wrong, None: nothing."""
    job = Job(secrets.token_hex(16), "probes", 1.0, request, min_tier=PROBATION, only=session)
    while True:
        try:
            await broker.submit(job)
            break
        except QueueFull:
            await asyncio.sleep(AGAIN_SECONDS)
    ended = asyncio.Event()
    heard: list[tuple[float, Event]] = []

    def hear(events: Sequence[Event]) -> None:
        heard.extend((time.monotonic(), event) for event in events)
        if events[-1].kind in TERMINAL:
            ended.set()

    leave = await broker.subscribe(job.id, BEGINNING, hear)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await ended.wait()
    except TimeoutError:
        return f"no answer within {PROBE_SECONDS:g} s"
    finally:
        leave()
        await broker.cancel(job.id, "disconnect")  # if it has not ended
    return judge(heard)


def judge(heard: Sequence[tuple[float, Event]]) -> str | None:
    """What is wrong with a probe's events, which came at those times (seconds); None: nothing."""
    last = heard[-1][1]
    if last.kind != "done":
        return f"it {last.kind}: {last.facts.get('message') or last.facts.get('which') or last.facts.get('by')}"
    if last.attempt > 1:
        return "it was not answered at the first attempt"
    count = sum(event.token is not None for _, event in heard)
    seconds = heard[-1][0] - heard[0][0]
    if not count:
        return "an answer without a token"
    if count > FASTEST * seconds:
        return f"{count} tokens in {seconds * 1e3:.2f} ms: no machine is as fast"
    return None
