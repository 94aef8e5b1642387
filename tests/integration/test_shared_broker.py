"""Gateways that share a Valkey server: what clients see at either of them, and what a lost server or gateway costs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace._common.errors import StartupError
from headrace_router.network.jobs import Policy
from headrace_router.network.shared import SharedBroker
from tests.fakes.brokers import Valkey
from tests.fakes.network import Net, network
from tests.fakes.routers import until

IDS = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    """A server that tests may kill, as long as they start it again."""
    server = Valkey()
    yield server
    server.stop()


@pytest.fixture
async def pair(tmp_path: Path, valkey: Valkey) -> AsyncIterator[tuple[Net, Net]]:
    """Two gateways of one model and one server."""
    async with network(tmp_path, broker=valkey.url) as one, network(tmp_path, broker=valkey.url) as other:
        yield one, other
        await until(lambda: one.gateway.running + one.gateway.waiting == 0)
    await empty(valkey)


async def empty(valkey: Valkey) -> None:
    """Every test finds an empty server."""
    from redis.asyncio import Redis

    client = Redis.from_url(valkey.url)
    await client.flushall()
    await client.aclose()


def tokens(events: list[dict[str, Any]]) -> list[int]:
    told = [event for event in events if event["kind"] == "token"]
    assert [event["index"] for event in told] == list(range(len(told)))
    return [event["id"] for event in told]


async def kept(net: Net, job: str, count: int) -> None:
    """Wait until the broker has so many tokens of a request."""
    async with asyncio.timeout(5):
        while (await net.get(f"/v1/requests/{job}")).json["tokens"] < count:  # noqa: ASYNC110 - kept by another process
            await asyncio.sleep(0.01)


async def test_a_request_of_one_gateway_is_served_and_read_at_the_other(pair: tuple[Net, Net]) -> None:
    here, there = pair
    worker = await there.scripted()
    job_id = (await here.ask()).json["id"]
    readers = [asyncio.create_task(net.events(job_id)) for net in pair]
    job = await worker.next("job")
    assert job["job"] == job_id
    await worker.step(job, IDS[:2])
    await worker.step(job, IDS[2:])
    await worker.done(job)
    one, other = [[event for event in events if event["kind"] != "queued"] for events in await asyncio.gather(*readers)]
    assert tokens(one) == IDS
    assert one == other
    rest = await here.events(job_id, **{"Last-Event-ID": one[2]["event_id"]})
    assert rest == one[3:]
    last = await there.get(f"/v1/requests/{job_id}/events", **{"Last-Event-ID": one[-1]["event_id"]})
    assert last.status == 204
    assert (await there.get(f"/v1/requests/{job_id}")).json["state"] == "done"
    stream = asyncio.create_task(here.post("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 2}}))
    job = await worker.next("job")
    await worker.step(job, IDS[:2])
    assert [event["token"]["id"] for event in (await stream).events] == IDS[:2]


async def test_positions_and_keys_are_of_all_gateways(pair: tuple[Net, Net]) -> None:
    here, there = pair
    worker = await there.scripted()
    first = (await here.ask()).json["id"]
    await worker.next("job")
    second, third = (await there.ask()).json, (await here.ask()).json
    assert (second["position"], third["position"]) == (0, 1)
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 8}}
    replies = await asyncio.gather(*(
        net.post("/v1/requests", body, **{"Idempotency-Key": "k"}) for net in (here, there, here)
    ))
    assert [reply.status for reply in replies] == [202] * 3
    assert len({reply.json["id"] for reply in replies}) == 1
    changed = await there.post("/v1/requests", {**body, "inputs": "else"}, **{"Idempotency-Key": "k"})
    assert changed.status == 409
    assert await there.delete(f"/v1/requests/{second['id']}") == 204
    assert (await here.get(f"/v1/requests/{third['id']}")).json["position"] == 0
    assert await here.delete(f"/v1/requests/{first}") == 204  # its worker is at the other gateway
    assert (await worker.next("cancel"))["job"] == first
    for _ in range(2):
        await worker.done(await worker.next("job"))


async def test_a_gateway_that_stops_leaves_its_requests_to_the_other(tmp_path: Path, valkey: Valkey) -> None:
    async with network(tmp_path, broker=valkey.url) as here:
        async with network(tmp_path, broker=valkey.url) as there:
            worker = await there.scripted()
            job_id = (await there.ask()).json["id"]
            job = await worker.next("job")
            await worker.step(job, IDS[:2])
            await kept(there, job_id, 2)
        other = await here.scripted()
        again = await other.next("job")
        assert (again["job"], again["rng_offset"]) == (job_id, 2)
        await other.step(again, IDS[2:])
        await other.done(again)
        assert tokens(await here.events(job_id)) == IDS
    await empty(valkey)


@pytest.mark.parametrize("lost", [False, True], ids=["restarted", "wiped"])
async def test_the_server_is_killed_in_the_middle(pair: tuple[Net, Net], valkey: Valkey, lost: bool) -> None:
    here, _ = pair
    worker = await here.scripted(slots=2)
    job_id = (await here.ask()).json["id"]
    reader = asyncio.create_task(here.events(job_id))
    job = await worker.next("job")
    await worker.step(job, IDS[:2])
    await kept(here, job_id, 2)
    waits = (await here.ask()).json["id"]
    valkey.kill()
    asked = await here.ask()
    assert (asked.status, asked.headers["Retry-After"]) == (503, "1")
    assert (await here.get("/health")).status == 200
    assert (await here.get(f"/v1/requests/{job_id}")).status == 503
    await worker.step(job, IDS[2:])
    (valkey.wipe if lost else valkey.start)()
    if lost:
        assert (await worker.next("cancel", 10))["job"] == job_id
    jobs = {}
    while (lost and job_id not in jobs) or waits not in jobs:
        frame = await worker.next("job", 10)
        jobs[frame["job"]] = frame
    again = jobs.get(job_id, job)
    if lost:
        assert again["rng_offset"] in (2, 4)
        await worker.step(again, IDS[again["rng_offset"] :])
    await worker.done(again)
    await worker.done(jobs[waits])
    assert tokens(await reader) == IDS
    assert (await here.events(waits))[-1]["kind"] == "done"


async def test_what_is_lost_for_good_is_told(tmp_path: Path, valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway that could bring it again is gone too."""
    monkeypatch.setattr("headrace_router.network.shared.LOST_SECONDS", 0.5)
    async with network(tmp_path, broker=valkey.url) as here:
        async with network(tmp_path, broker=valkey.url) as there:
            await there.scripted(slots=1)
            job_id = (await there.ask()).json["id"]
            reader = asyncio.create_task(here.events(job_id))
            await until(lambda: here.gateway.is_read(job_id))
        await empty(valkey)
        assert (await reader)[-1]["code"] == "lost"
    await empty(valkey)


async def test_a_server_that_stays_away_ends_what_waits_for_it(
    tmp_path: Path, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_router.network.role.BROKER_GRACE", 1.0)
    async with network(tmp_path, broker=valkey.url) as net:
        worker = await net.scripted()
        stream = asyncio.create_task(net.post("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 8}}))
        job = await worker.next("job")
        await worker.step(job, IDS[:2])
        await kept(net, job["job"], 2)
        valkey.kill()
        try:
            events = (await asyncio.wait_for(stream, 10)).events
            assert [event["token"]["id"] for event in events if "token" in event] == IDS[:2]
            assert "does not answer" in events[-1]["error"]
            await until(lambda: not net.router.service.shard.healthy)
            assert (await net.get("/health")).status == 503
        finally:
            valkey.start()
        await until(lambda: net.router.service.shard.healthy)
        await worker.done(job)
        asked = (await net.ask()).json["id"]
        await worker.done(await worker.next("job"))
        assert (await net.events(asked))[-1]["kind"] == "done"
    await empty(valkey)


async def test_a_frozen_server_is_waited_for(pair: tuple[Net, Net], valkey: Valkey) -> None:
    here, there = pair
    worker = await here.scripted()
    job_id = (await there.ask()).json["id"]
    job = await worker.next("job")
    valkey.send(signal.SIGSTOP)
    await worker.step(job, IDS[:2])
    await asyncio.sleep(1)
    valkey.send(signal.SIGCONT)
    await worker.step(job, IDS[2:])
    await worker.done(job)
    assert tokens(await there.events(job_id)) == IDS


async def test_what_a_server_must_be_is_said_at_the_start(valkey: Valkey) -> None:
    from redis.asyncio import Redis

    client = Redis.from_url(valkey.url)
    await client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StartupError, match=r"evicts keys .*allkeys-lru.*noeviction"):
            await SharedBroker(valkey.url, Policy(8), "x").start(1.0)
    finally:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.aclose()
    with pytest.raises(StartupError, match=r"redis://127.0.0.1:1/0 cannot be reached"):
        await SharedBroker("redis://user:secret@127.0.0.1:1/0", Policy(8), "x").start(0.1)
