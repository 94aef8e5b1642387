"""Requests are given up in the queue, in the prompt, while they run and while they end: one terminal event, and a free slot."""

from __future__ import annotations

import asyncio
import random
import re
import urllib.request
from collections import Counter

import pytest

from tests.chaos.conftest import SLOTS
from tests.chaos.streams import TERMINAL, Client, Heard, until
from tests.networks import Network

FREE_WITHIN = 1.0  # seconds from a cancel to the free slot


def used_slots(net: Network) -> int:
    return sum(row["running"] for row in net.show()["workers"])


def worker_rows(net: Network) -> float:
    """Requests in the workers' own batches."""
    rows = 0.0
    for worker in net.workers:
        with urllib.request.urlopen(f"{worker.url}/metrics", timeout=10) as reply:
            rows += float(re.findall(r"^tgi_batch_current_size (\S+)", reply.read().decode(), re.MULTILINE)[0])
    return rows


async def give_up(client: Client, tokens: int, after: float) -> Heard:
    job = await client.ask(f"Cancel {after}", tokens)
    reader = asyncio.create_task(client.follow(job))
    await asyncio.sleep(after)
    assert await client.delete(job) == 204
    heard = await reader
    assert (await client.follow(job)).logged == heard.logged
    return heard


async def test_a_cancel_that_races_with_the_end(net: Network, client: Client) -> None:
    """Some of them win and some lose; each log has one terminal event, its last."""
    draw = random.Random(3)
    ends: Counter[str] = Counter()
    for _ in range(3):
        plans = [(draw.randrange(1, 30), draw.uniform(0, 0.1)) for _ in range(24)]
        for stream in await asyncio.gather(*(give_up(client, *plan) for plan in plans)):
            kinds = [event["kind"] for event in stream.logged]
            assert [kind for kind in kinds if kind in TERMINAL] == kinds[-1:]
            assert [token["index"] for token in stream.tokens] == list(range(len(stream.tokens)))
            ends[kinds[-1]] += 1
    assert set(ends) == {"cancelled", "done"}, ends
    await until(lambda: used_slots(net) == 0 == worker_rows(net))


@pytest.mark.chaos
async def test_a_cancel_frees_the_slot_of_a_worker(net: Network, client: Client) -> None:
    """All slots are taken by long requests and others wait: what is given up makes room, whatever it was at."""
    slots = len(net.show()["workers"]) * SLOTS
    running = [await client.ask(f"Long {number}", 8000) for number in range(slots)]
    waiting = [await client.ask(f"Waiting {number}", 8000) for number in range(4)]
    await until(lambda: used_slots(net) == slots)
    assert net.show()["queue"] == 4
    assert await client.delete(waiting[1]) == 204
    assert (await client.state(waiting[2]))["position"] == 1
    for job in running:
        assert await client.delete(job) == 204
    seconds = await until(lambda: used_slots(net) == 3 and net.show()["queue"] == 0)
    print(f"\n{slots} slots are free {seconds:.3f} s after their cancels")
    assert seconds < FREE_WITHIN
    for job in waiting:
        assert await client.delete(job) == 204
    assert await until(lambda: used_slots(net) == 0 == worker_rows(net)) < FREE_WITHIN
    for job in [*running, *waiting]:
        assert (await client.follow(job)).events[-1]["kind"] == "cancelled"
