"""Workers that misbehave at the WebSocket: each harms its own jobs and its own connection at most."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from headrace_router.network import line
from headrace_router.network.frames import PATH, PROTOCOLS
from headrace_router.network.role import MOST_SLOTS
from tests.fakes.network import JSON, Net, ScriptedWorker, network
from tests.fakes.routers import until

IDS = [40, 41, 42, 43]


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Net]:
    async with network(tmp_path) as made:
        yield made
        await until(lambda: made.gateway.live == 0)


async def rescued(net: Net, job_id: str) -> None:
    """An honest worker ends what is left of a request, whose tokens are the honest ones."""
    honest = await net.scripted()
    job = await honest.next("job")
    assert job["job"] == job_id
    await honest.step(job, IDS[job["rng_offset"] :])
    await honest.done(job)
    events = await net.events(job_id)
    assert [event["id"] for event in events if event["kind"] == "token"] == IDS
    assert events[-1]["kind"] == "done"


async def given(net: Net, worker: ScriptedWorker) -> dict[str, Any]:
    await net.ask()
    return await worker.next("job")


async def test_a_foreign_job_is_not_touched(net: Net) -> None:
    owner, meddler = await net.scripted(), await net.scripted()
    await owner.next("welcome")
    await meddler.next("welcome")
    job_id = (await net.ask()).json["id"]
    holder = max(net.gateway.sessions.values(), key=lambda session: len(session.outputs))
    if (await owner_or(owner, meddler)) is meddler:
        owner, meddler = meddler, owner
    await meddler.send(t="accept", job=job_id, attempt=1)
    await meddler.send(t="step", x=[[job_id, 1, 0, 99, -1.0, 0, []]])
    await meddler.send(t="fail", job=job_id, attempt=1, code="internal", retriable=False, message="not mine")
    await meddler.send(t="nack", job=job_id, attempt=1)
    await meddler.send(t="done", job=job_id, attempt=1, finish="eos")
    for _ in range(4):  # a `done` needs no answer: it may be a late one
        cancel = await meddler.next("cancel")
        assert (cancel["job"], cancel["reason"]) == (job_id, "stale")
    assert list(holder.outputs) == [job_id]
    await owner.send(t="step", x=[[job_id, 1, k, i, -0.5, 0, []] for k, i in enumerate(IDS)])
    await owner.send(t="done", job=job_id, attempt=1)
    events = await net.events(job_id)
    assert [event["id"] for event in events if event["kind"] == "token"] == IDS
    assert net.gateway.metrics.stale_frames == 4


async def owner_or(*workers: ScriptedWorker) -> ScriptedWorker:
    """The one that gets the job."""
    tasks = {asyncio.create_task(worker.next("job")): worker for worker in workers}
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return tasks[done.pop()]


@pytest.mark.parametrize("attempt", [0, 2, -1, 2**62])
async def test_another_attempt_is_not_the_jobs(net: Net, attempt: int) -> None:
    worker = await net.scripted()
    job = await given(net, worker)
    await worker.send(t="step", x=[[job["job"], attempt, 0, 99, -1.0, 0, []]])
    assert (await worker.next("cancel"))["attempt"] == attempt
    await worker.step(job, IDS)
    await worker.done(job)
    events = await net.events(job["job"])
    assert [event["id"] for event in events if event["kind"] == "token"] == IDS


async def test_duplicates_within_and_over_frames_count_once(net: Net) -> None:
    worker = await net.scripted()
    job = await given(net, worker)
    await worker.step(job, IDS[:3])
    for _ in range(3):
        await worker.step(job, IDS[:3], index=0)
    await worker.step(job, IDS, index=0)
    await worker.done(job)
    await worker.done(job)
    events = await net.events(job["job"])
    assert [event["index"] for event in events if event["kind"] == "token"] == [0, 1, 2, 3]
    assert net.gateway.metrics.duplicates == 12


@pytest.mark.parametrize("rows", [
    [[0, 40], [2, 42]], [[0, 40], [0, 41]], [[1, 41]], [[0, 40], [1, 10**9]], [[0, -1]],
], ids=["gap within", "twice", "gap", "no such token", "negative"])
async def test_tokens_that_cannot_be_cost_the_job(net: Net, rows: list[list[int]]) -> None:
    liar = await net.scripted()
    job = await given(net, liar)
    await liar.send(t="step", x=[[job["job"], 1, index, token, -0.5, 0, []] for index, token in rows])
    await until(lambda: net.gateway.broker.counts.redeliveries)
    liar.cut()
    await rescued(net, job["job"])


async def test_an_oversize_frame_ends_the_connection_before_it_is_read(net: Net) -> None:
    worker = await net.scripted()
    job = await given(net, worker)
    with contextlib.suppress(ConnectionError):
        await worker.socket.send_str('{"t": "bye", "reason": "' + "x" * (1 << 20) + '"}')
    assert await worker.closed() == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
    await rescued(net, job["job"])


async def test_msgpack_that_is_none_is_forgiven_twice(net: Net) -> None:
    served = {"id": "scripted", "tokenizer_hash": net.router.service.tokenizer_hash, "max_total": 1024, "features": ["resume"]}
    headers = {"Authorization": f"Bearer {net.token}"}
    async with net.session.ws_connect(net.url + PATH, headers=headers, protocols=PROTOCOLS) as worker:
        assert worker.protocol == PROTOCOLS[0]
        await worker.send_bytes(msgspec.msgpack.encode({"t": "hello", "models": [served], "slots": 1, "unheard": {"of": 1}}))
        welcome = msgspec.msgpack.decode((await worker.receive()).data)
        assert welcome["t"] == "welcome"
        for wrong in (b"\xc1", msgspec.msgpack.encode({"t": "step", "x": 5})):
            await worker.send_bytes(wrong)
        await worker.send_bytes(msgspec.msgpack.encode({"t": "a kind of another version"}))
        await worker.send_bytes(msgspec.msgpack.encode({"t": "ping", "n": 5, "more": []}))
        assert msgspec.msgpack.decode((await worker.receive()).data) == {"t": "pong", "n": 5}
        metrics = (await net.get("/metrics")).raw.decode()
        assert "wn_malformed_frames_total 2" in metrics
        assert "wn_unknown_frames_total 1" in metrics
        await worker.send_bytes(b"\x93\x01")
        closing = await worker.receive()
        assert (closing.type, closing.data) == (aiohttp.WSMsgType.CLOSE, 4400)


@pytest.mark.parametrize("slots", [MOST_SLOTS * 1000, 2])
async def test_a_lie_about_slots_gives_no_more_than_is_granted(net: Net, slots: int) -> None:
    liar = await net.scripted(slots=slots)
    granted = (await liar.next("welcome"))["slots"]
    assert granted == min(slots, MOST_SLOTS)
    await liar.send(t="status", running=[], slots_free=10**12, kv_free_tokens=10**12)
    await liar.send(t="capacity", slots=10**12)
    await liar.send(t="ping", n=1)
    await liar.next("pong")
    [session] = net.gateway.sessions.values()
    assert session.free == granted
    ids = [(await net.ask()).json["id"] for _ in range(3)]
    assert len(session.outputs) == min(granted, 3)
    await liar.send(t="status", running=[], slots_free=-5, kv_free_tokens=-5)
    await liar.send(t="capacity", slots=-5)
    await liar.send(t="ping", n=2)
    await liar.next("pong")
    assert session.free == 0
    for job_id in ids:
        assert await net.delete(f"/v1/requests/{job_id}") == 204


@pytest.mark.parametrize("slots", [0, -1])
async def test_a_worker_without_slots_is_refused(net: Net, slots: int) -> None:
    assert await (await net.scripted(slots=slots)).closed() == 4409


async def test_a_handshake_that_never_ends_is_cut(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.api.workers.HELLO_SECONDS", 0.3)
    headers = {"Authorization": f"Bearer {net.token}"}
    async with net.session.ws_connect(net.url + PATH, headers=headers, protocols=[JSON]) as silent:
        closing = await silent.receive(timeout=2)
        assert (closing.type, closing.data) == (aiohttp.WSMsgType.CLOSE, 4400)
    async with net.session.ws_connect(net.url + PATH, headers=headers, protocols=[JSON]) as early:
        await early.send_json({"t": "ping", "n": 1})  # anything before the hello
        assert (await early.receive(timeout=2)).data == 4400
    assert not net.gateway.sessions


async def test_a_head_that_does_not_go_on_is_cut(tmp_path: Path) -> None:
    async with network(tmp_path, client_timeout=0.5) as net:
        address = urlsplit(net.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for byte in f"GET {PATH} HTTP/1.1\r\nHost: x\r\nAuth".encode():  # and no more
            writer.write(bytes([byte]))
            await writer.drain()
        assert b"408 Request Timeout" in await reader.read(200)
        writer.close()


async def test_a_worker_that_does_not_read_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own frames come on, so that it does not look frozen; what it is sent would wait for ever."""
    monkeypatch.setattr(line, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(line, "CLOSE_SECONDS", 0.3)
    async with network(tmp_path) as net:
        worker = await net.scripted()
        job = await given(net, worker)
        [session] = net.gateway.sessions.values()
        inward = worker.socket._writer.transport
        inward.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        outward = session.line._socket._req.transport
        outward.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        inward.pause_reading()

        async def ask_for_answers() -> None:
            with contextlib.suppress(ConnectionError):
                for number in range(200):
                    await worker.send(t="step", x=[[f"{number}-{k}", 1, 0, 40, -1.0, 0, []] for k in range(200)])

        asking = asyncio.create_task(ask_for_answers())
        await until(lambda: not net.gateway.sessions, 10)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert session.line.ended in ("you do not read", "too many frames wait for you")
        worker.cut()
        await rescued(net, job["job"])


async def test_a_worker_that_floods_while_its_frames_wait_is_cut_off(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that does not answer holds up what a worker says, not the reading: pings go on, up to a bound."""
    monkeypatch.setattr(line, "INBOX", 50)
    held = asyncio.Event()
    renew = net.gateway.broker.renew

    async def slow(*what: Any) -> None:
        await held.wait()
        await renew(*what)

    worker = await net.scripted()
    job = await given(net, worker)
    await worker.step(job, IDS[:1])
    await until(lambda: next(iter(net.gateway.sessions.values())).tokens == 1)
    monkeypatch.setattr(net.gateway.broker, "renew", slow)
    for _ in range(60):
        await worker.send(t="status", running=[[job["job"], 1, 1]])
    assert await worker.closed() == 4408
    held.set()
    await until(lambda: not net.gateway.sessions)
    await rescued(net, job["job"])


async def test_words_of_a_worker_do_not_reach_labels_of_metrics(net: Net) -> None:
    worker = await net.scripted(format='f"32\n' + "x" * 4000)
    job_id = (await net.ask()).json["id"]
    for number in range(4):
        job = await worker.next("job")
        await worker.send(t="fail", job=job_id, attempt=job["attempt"], code=f'x"{number}\n', retriable=True)
    assert (await net.events(job_id))[-1]["code"] == "attempts_exhausted"
    assert net.gateway.broker.counts.redeliveries == {"fail": 3}
    assert len((await net.get("/v1/workers")).json["workers"][0]["weight_format"]) <= 32
