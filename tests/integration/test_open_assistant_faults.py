"""The faults of Open Assistant's inference network, each by its number: with the workers that brought them out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace_router.network import frames
from headrace_router.network.jobs import TERMINAL
from tests.fakes.network import Net, network
from tests.fakes.routers import until

IDS = [40, 41, 42, 43]
ROUNDS = 10


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Net]:
    async with network(tmp_path) as made:
        yield made
        await until(lambda: made.gateway.live == 0)


def told(events: list[dict[str, Any]]) -> list[int]:
    """Ids of an output whose indices are whole."""
    tokens = [event for event in events if event["kind"] == "token"]
    assert [token["index"] for token in tokens] == list(range(len(tokens)))
    return [token["id"] for token in tokens]


async def test_w1_a_worker_that_goes_with_a_free_slot_takes_nothing_along(net: Net) -> None:
    """The dying handler took what it had just put back."""
    for _ in range(ROUNDS):
        dying = await net.scripted(slots=2)
        await dying.next("welcome")
        job_id = (await net.ask()).json["id"]
        await dying.next("job")
        dying.cut()
        other = await net.scripted()
        again = await other.next("job")
        assert (again["job"], again["attempt"]) == (job_id, 2)
        await other.step(again, IDS)
        await other.done(again)
        assert told(await net.events(job_id)) == IDS
        other.cut()
        await until(lambda: not net.gateway.sessions)


async def test_w2_a_request_that_comes_as_its_worker_goes_is_kept(net: Net) -> None:
    """What was handed out in the same turn as the connection ended was dropped."""
    for _ in range(ROUNDS):
        dying = await net.scripted()
        await dying.next("welcome")
        asked = asyncio.create_task(net.ask())
        dying.cut()
        job_id = (await asked).json["id"]
        other = await net.scripted()
        job = await other.next("job")
        assert job["job"] == job_id
        await other.step(job, IDS)
        await other.done(job)
        assert told(await net.events(job_id)) == IDS
        other.cut()
        await until(lambda: not net.gateway.sessions)


@pytest.mark.parametrize("kind", ["cancelled", "expired"])
async def test_w3_what_was_cancelled_or_too_late_has_ended_for_every_reader(tmp_path: Path, kind: str) -> None:
    """Such requests were pending for ever, also for who came back."""
    async with network(tmp_path, max_queue_time=0.5) as net:
        worker = await net.scripted()
        running = (await net.ask()).json["id"]
        await worker.next("job")
        waiting = (await net.ask()).json["id"]
        early = asyncio.create_task(net.events(waiting))
        if kind == "cancelled":
            assert await net.delete(f"/v1/requests/{waiting}") == 204
        events = await early
        assert events[-1]["kind"] == kind
        late = await net.events(waiting)
        assert [event["kind"] for event in late] == [kind]
        assert (await net.get(f"/v1/requests/{waiting}")).json["state"] == kind
        again = await net.get(f"/v1/requests/{waiting}/events", **{"Last-Event-ID": late[-1]["event_id"]})
        assert again.status == 204
        assert await net.delete(f"/v1/requests/{running}") == 204


async def test_w4_a_gateway_that_stops_leaves_no_request_without_an_end(tmp_path: Path) -> None:
    """After a restart of the server rows were in progress for ever. (What outlives a gateway is tested with its brokers.)"""
    async with network(tmp_path) as net:
        worker = await net.scripted()
        ids = [(await net.ask()).json["id"] for _ in range(3)]
        job = await worker.next("job")
        await worker.step(job, IDS[:1])
        readers = [asyncio.create_task(net.events(job_id)) for job_id in ids]
        stream = asyncio.create_task(net.post("/generate_stream", {"inputs": "x"}))
        await until(lambda: net.gateway.metrics.readers == 3 and net.gateway.live == 4)
        stopping = asyncio.create_task(net.router.stop())
        for events in await asyncio.gather(*readers):
            assert [event["kind"] for event in events if event["kind"] in TERMINAL] == ["failed"]
            assert (events[-1]["code"], events[-1]["retriable"]) == ("shutdown", True)
        assert "stopping" in (await stream).events[-1]["error"]
        await stopping


async def test_w5_all_readers_get_every_token_and_a_reader_that_comes_back_misses_none(net: Net) -> None:
    """Two readers got every other token each; a reconnect lost one."""
    worker = await net.scripted()
    job_id = (await net.ask()).json["id"]
    readers = [asyncio.create_task(net.events(job_id)) for _ in range(3)]
    await until(lambda: net.gateway.metrics.readers == 3)
    job = await worker.next("job")
    for token in IDS:
        await worker.step(job, [token])
    await worker.done(job)
    heard = [[event for event in await reader if event["kind"] != "queued"] for reader in readers]
    assert heard[0] == heard[1] == heard[2] == await net.events(job_id)
    assert told(heard[0]) == IDS
    for place, event in enumerate(heard[0][:-1]):
        assert await net.events(job_id, **{"Last-Event-ID": event["event_id"]}) == heard[0][place + 1 :]


async def test_w6_a_cancel_reaches_the_worker_and_frees_its_slot(net: Net) -> None:
    """A worker went on with what nobody wanted."""
    worker = await net.scripted()
    first, second = [(await net.ask()).json["id"] for _ in range(2)]
    job = await worker.next("job")
    await worker.step(job, IDS[:2])
    assert await net.delete(f"/v1/requests/{first}") == 204
    cancel = await worker.next("cancel")
    assert (cancel["job"], cancel["attempt"], cancel["reason"]) == (first, 1, "user")
    await worker.done(job, "cancelled")
    job = await worker.next("job")
    assert job["job"] == second
    await worker.step(job, IDS)
    await worker.done(job)
    assert (await net.events(first))[-1] == {"kind": "cancelled", "by": "user", "event_id": "1-3"}
    assert told(await net.events(second)) == IDS


@pytest.mark.parametrize("crash_at", [0, 1, 3])
async def test_w7_a_death_after_some_tokens_is_no_failure(net: Net, crash_at: int) -> None:
    """From the first token on, a lost worker was the end of the answer."""
    dying = await net.scripted()
    job_id = (await net.ask()).json["id"]
    job = await dying.next("job")
    if crash_at:
        await dying.step(job, IDS[:crash_at])
        await until(lambda: next(iter(net.gateway.sessions.values())).tokens == crash_at)
    dying.cut()
    other = await net.scripted()
    again = await other.next("job")
    assert again["rng_offset"] == crash_at
    await other.step(again, IDS[crash_at:])
    await other.done(again)
    events = await net.events(job_id)
    assert told(events) == IDS
    assert events[-1]["kind"] == "done"


async def test_w8_a_bad_frame_or_a_failed_request_ends_no_connection(net: Net) -> None:
    """Either tore down all that the worker ran."""
    worker = await net.scripted(slots=2)
    failing, sane = [(await net.ask()).json["id"] for _ in range(2)]
    jobs = {job["job"]: job for job in [await worker.next("job"), await worker.next("job")]}
    await worker.step(jobs[sane], IDS[:2])
    await worker.socket.send_str("{")
    await worker.send(t="fail", job=failing, attempt=1, code="bad_request", retriable=False, message="no such thing")
    assert (await net.events(failing))[-1]["kind"] == "failed"
    await worker.step(jobs[sane], IDS[2:])
    await worker.done(jobs[sane])
    events = await net.events(sane)
    assert told(events) == IDS
    assert {event["event_id"].split("-")[0] for event in events} == {"1"}
    assert not worker.socket.closed


async def test_w9_a_frozen_worker_is_noticed_by_its_pings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 49 s. Here it takes one and a half heartbeats, which are shorter for this test."""
    monkeypatch.setattr(frames, "HEARTBEAT", 0.4)
    async with network(tmp_path) as net:
        frozen = await net.scripted()
        job_id = (await net.ask()).json["id"]
        job = await frozen.next("job")
        await frozen.step(job, IDS[:1])
        other = await net.scripted()
        again = asyncio.create_task(other.next("job"))  # who reads answers pings
        assert (await again)["rng_offset"] == 1
        await other.step(again.result(), IDS[1:])
        await other.done(again.result())
        assert told(await net.events(job_id)) == IDS


async def test_w9_a_worker_whose_generation_hangs_loses_the_request(tmp_path: Path) -> None:
    """Its connection lived, and the request never ended."""
    async with network(tmp_path, stall_timeout=0.5) as net:
        hung = await net.scripted()
        job_id = (await net.ask()).json["id"]
        job = await hung.next("job")
        await hung.step(job, IDS[:1])

        async def seem_well() -> None:
            while True:
                await hung.send(t="status", running=[[job_id, 1, 1]], slots_free=0)
                await asyncio.sleep(0.1)

        beating = asyncio.create_task(seem_well())
        other = await net.scripted()
        again = await other.next("job")
        assert (await hung.next("cancel"))["reason"] == "stale"
        beating.cancel()
        await other.step(again, IDS[1:])
        await other.done(again)
        assert told(await net.events(job_id)) == IDS


async def test_w16_too_many_requests_are_told_so(tmp_path: Path) -> None:
    """The rate limit answered 500, and held for eleven minutes."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.anna]\nkeys = ["a"]\nrequests_per_minute = 2\n[tenants.otto]\nkeys = ["o"]\n')
    async with network(tmp_path / "model", api_keys_file=str(keys)) as net:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 8}}
        worker = await net.scripted()
        await worker.next("welcome")
        replies = [await net.post("/v1/requests", body, Authorization="Bearer a") for _ in range(4)]
        assert [reply.status for reply in replies] == [202, 202, 429, 429]
        assert all(0 < int(reply.headers["Retry-After"]) <= 60 for reply in replies[2:])
        assert (await net.post("/v1/requests", body, Authorization="Bearer o")).status == 202
        assert net.gateway.metrics.rejects == {"requests": 2}
        assert net.gateway.live == 3


async def test_w17_what_is_refused_leaves_nothing_and_a_crowd_does_not_pass_the_limit(tmp_path: Path) -> None:
    """A 503 left a row behind; and the check of the size was not one step with the push."""
    async with network(tmp_path, max_queue_size=3) as net:
        worker = await net.scripted()
        await net.ask()
        first = await worker.next("job")
        replies = await asyncio.gather(*(net.ask() for _ in range(20)))
        taken = [reply.json["id"] for reply in replies if reply.status == 202]
        refused = [reply for reply in replies if reply.status != 202]
        assert len(taken) == 3
        assert {reply.status for reply in refused} == {503}
        assert all(reply.headers["Retry-After"] for reply in refused)
        for reply in refused:
            assert (await net.get(f"/v1/requests/{reply.headers['X-Request-Id']}")).status == 404
        assert (net.gateway.waiting, net.gateway.running, net.gateway.broker.counts.accepted) == (3, 1, 4)
        for job_id in taken:
            assert await net.delete(f"/v1/requests/{job_id}") == 204
        await worker.done(first)
        await until(lambda: net.gateway.live == 0 and not net.router.service.background)
        metrics = (await net.get("/metrics")).raw.decode()
        assert "wn_unaccounted 0" in metrics
        assert "wn_accepted_total 4" in metrics
