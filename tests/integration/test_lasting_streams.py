"""Streamed answers over the network: their ids, and who comes back for them after the connection was lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace_router import sse
from tests.fakes.network import Net, ScriptedWorker, network
from tests.fakes.routers import until

IDS = [40, 41, 42, 43, 44, 45]
BODY = {"inputs": "hello", "parameters": {"max_new_tokens": 8}}
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}


async def begin(net: Net, worker: ScriptedWorker, count: int, **headers: str) -> tuple[aiohttp.ClientResponse, Any, list[str]]:
    """A stream that has shown so many tokens: the response, the job, and the blocks that were read."""
    response = await net.session.post(net.url + "/generate_stream", json=BODY, headers=headers)
    assert response.status == 200
    job = await worker.next("job")
    await worker.step(job, IDS[:count])
    return response, job, [await block(response) for _ in range(count)]


async def block(response: aiohttp.ClientResponse) -> str:
    lines: list[str] = []
    async with asyncio.timeout(3):
        while not lines or lines[-1]:
            lines.append((await response.content.readline()).decode().rstrip("\n"))
    return "\n".join(lines[:-1])


def id_of(block: str) -> str:
    return block.split("\n")[0].removeprefix("id: ")


async def finish(worker: ScriptedWorker, job: dict[str, Any], ids: list[int]) -> None:
    await worker.step(job, ids)
    await worker.done(job)


@pytest.mark.parametrize("given", [None, "call-1"])
async def test_a_stream_whose_connection_was_lost_is_picked_up_by_its_request_id(tmp_path: Path, given: str | None) -> None:
    async with network(tmp_path) as net:
        worker = await net.scripted()
        response, job, blocks = await begin(net, worker, 3, **({"X-Request-Id": given} if given else {}))
        name = response.headers["X-Request-Id"]
        assert (name == given) if given else (name == job["job"])
        shown = [json.loads(text.split("data: ")[1])["token"]["id"] for text in blocks]
        response.close()
        await until(lambda: bool(net.router.service.background))
        reader = asyncio.create_task(net.events(name, **{"Last-Event-ID": id_of(blocks[-1])}))
        await until(lambda: net.gateway.metrics.readers == 1)
        await finish(worker, job, IDS[3:])
        rest = await reader
        assert shown + [event["id"] for event in rest if event["kind"] == "token"] == IDS
        assert [event["kind"] for event in rest] == ["token"] * 3 + ["done"]
        assert net.gateway.metrics.resumes == 1
        again = await net.get(f"/v1/requests/{name}/events", **{"Last-Event-ID": rest[-1]["event_id"]})
        assert (again.status, again.raw) == (204, b"")
        assert (await net.get(f"/v1/requests/{name}")).json["id"] == job["job"]
        await until(lambda: not net.router.service.background)


async def test_the_id_of_the_last_event_is_that_of_the_end(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        worker = await net.scripted()
        asked = asyncio.create_task(net.post("/generate_stream", BODY))
        job = await worker.next("job")
        await worker.step(job, [*IDS, 46, 47])  # as many as it may have
        reply = await asked
        blocks = reply.raw.decode().strip().split("\n\n")
        assert [id_of(text) for text in blocks] == [f"1-{n}" for n in (1, 2, 3, 4, 5, 6, 7, 9)]
        name = reply.headers["X-Request-Id"]
        assert (await net.get(f"/v1/requests/{name}/events", **{"Last-Event-ID": "1-9"})).status == 204
        [end] = await net.events(name, **{"Last-Event-ID": "1-8"})
        assert (end["kind"], end["finish_reason"]) == ("done", "length")


async def test_a_stream_that_nobody_comes_back_for_ends_after_the_grace(tmp_path: Path) -> None:
    async with network(tmp_path, disconnect_grace=0.6) as net:
        worker = await net.scripted()
        response, job, _ = await begin(net, worker, 2)
        response.close()
        await until(lambda: bool(net.router.service.background))
        await worker.step(job, IDS[2:4])  # it goes on meanwhile
        await until(lambda: next(iter(net.gateway.sessions.values())).tokens == 4)
        assert (await worker.next("cancel"))["reason"] == "disconnect"
        events = await net.events(response.headers["X-Request-Id"])
        assert [e["id"] for e in events if e["kind"] == "token"] == IDS[:4]
        assert (events[-1]["kind"], events[-1]["by"]) == ("cancelled", "disconnect")


async def test_a_reader_who_came_back_holds_the_stream(tmp_path: Path) -> None:
    async with network(tmp_path, disconnect_grace=0.4) as net:
        worker = await net.scripted()
        response, job, _ = await begin(net, worker, 1)
        name = response.headers["X-Request-Id"]
        response.close()
        reader = asyncio.create_task(net.events(name))
        await until(lambda: net.gateway.metrics.readers == 1)
        await asyncio.sleep(1.0)
        await finish(worker, job, IDS[1:])
        assert (await reader)[-1]["kind"] == "done"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_without_grace_or_stream_a_client_that_goes_ends_its_request(tmp_path: Path, path: str) -> None:
    grace = 0 if path == "/generate_stream" else 10
    async with network(tmp_path, disconnect_grace=grace) as net:
        worker = await net.scripted()
        asked = asyncio.create_task(net.session.post(net.url + path, json=BODY))
        await worker.next("job")
        if asked.done():
            asked.result().close()
        else:
            asked.cancel()
        assert (await worker.next("cancel"))["reason"] == "disconnect"
        assert not net.router.service.background


async def test_a_tenant_pays_for_what_came_after_its_client_left(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.anna]\nkeys = ["a"]\ntokens_per_minute = 1000\n')
    async with network(tmp_path / "model", api_keys_file=str(keys)) as net:
        worker = await net.scripted()
        response, job, _ = await begin(net, worker, 1, Authorization="Bearer a")
        response.close()
        await until(lambda: bool(net.router.service.background))
        await finish(worker, job, IDS[1:])
        await until(lambda: not net.router.service.background)
        metrics = (await net.get("/metrics")).raw.decode()
        assert 'tgi_tenant_generated_tokens{tenant="anna"} 7' in metrics  # the end token too
        events = f"/v1/requests/{response.headers['X-Request-Id']}/events"
        assert (await net.get(events)).status == 401


@pytest.mark.parametrize(("path", "headers", "numbered"), [
    ("/v1/chat/completions", {}, False), ("/v1/chat/completions", {"X-Headrace-Event-Ids": "true"}, True),
    ("/v1/chat/completions?event_ids=true", {}, True), ("/generate_stream", {"X-Headrace-Event-Ids": "false"}, False),
    ("/generate_stream", {}, True), ("/", {}, True),
])
async def test_ids_come_where_clients_take_them(
    tmp_path: Path, path: str, headers: dict[str, str], numbered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.15)
    async with network(tmp_path) as net:
        worker = await net.scripted()
        body = CHAT if "chat" in path else {**BODY, "stream": True} if path == "/" else BODY
        asked = asyncio.create_task(net.post(path, body, **headers))
        job = await worker.next("job")
        await worker.step(job, IDS[:2])
        await asyncio.sleep(0.4)
        await finish(worker, job, IDS[2:])
        text = (await asked).raw.decode()
        lines = text.split("\n")
        assert [line for line in lines if line.startswith("id: ")] == [f"id: 1-{n}" for n in (1, 2, 3, 4, 5, 6, 7)] * numbered
        pings = [place for place, line in enumerate(lines) if line == ": ping"]
        assert pings
        assert all(lines[place + 1] for place in pings)  # an empty event after an id is one too many for some
        if numbered:
            assert all(lines[place + 1].startswith("data: ") for place, line in enumerate(lines) if line.startswith("id: "))


async def test_ids_are_asked_for_with_true_or_false(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        worker = await net.scripted()
        await worker.next("welcome")
        refused = await net.post("/v1/chat/completions?event_ids=yes", CHAT)
        assert refused.status == 400
        assert "event_ids" in refused.json["error"]["message"]
        assert net.gateway.broker.counts.accepted == 0


async def test_the_choices_of_a_call_are_found_one_by_one(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        worker = await net.scripted(slots=2)
        asked = asyncio.create_task(net.post("/v1/chat/completions", {**CHAT, "n": 2, "temperature": 1, "seed": 5}))
        jobs = [await worker.next("job"), await worker.next("job")]
        for job, token in zip(jobs, IDS, strict=False):
            await finish(worker, job, [token])
        name = (await asked).headers["X-Request-Id"]
        found = [(await net.get(f"/v1/requests/{name}{suffix}")).json["id"] for suffix in ("", ".1")]
        assert sorted(found) == sorted(job["job"] for job in jobs)
        assert (await net.get(f"/v1/requests/{name}.2")).status == 404


async def test_what_is_not_kept_any_more_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with network(tmp_path) as net:
        broker = net.gateway.broker
        monkeypatch.setattr(broker, "_policy", type(broker._policy)(max_queue_size=9, retention=0.1))
        worker = await net.scripted()
        job_id = (await net.ask()).json["id"]
        await finish(worker, await worker.next("job"), IDS)
        await until(lambda: not broker._records)
        for path in (f"/v1/requests/{job_id}", f"/v1/requests/{job_id}/events"):
            assert (await net.get(path)).status == 410
            assert (await net.get(path.replace(job_id, "0" * 32))).status == 404
        assert await net.delete(f"/v1/requests/{job_id}") == 410
