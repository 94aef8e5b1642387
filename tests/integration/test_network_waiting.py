"""What a gateway tells those who wait, whom it turns away, and what it hands to a worker: no more than that has room for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.network import FEATURES, Net, ScriptedWorker, network
from tests.fakes.routers import until

IDS = [40, 41, 42, 43]
GRAMMAR = {"type": "regex", "value": "[a-z]+"}


async def finish(worker: ScriptedWorker, job: dict[str, Any]) -> None:
    await worker.step(job, IDS)
    await worker.done(job)


async def settle(net: Net, *jobs: str) -> None:
    for job in jobs:
        assert await net.delete(f"/v1/requests/{job}") == 204
    await until(lambda: net.gateway.live == 0)


async def test_who_waits_is_told_a_place_and_a_time(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        worker = await net.scripted()
        first = (await net.ask(tokens=100)).json
        assert (first["position"], first["eta_s"]) == (0, None)  # nothing has been measured
        job = await worker.next("job")
        for _ in range(10):
            await worker.step(job, IDS)
            await asyncio.sleep(0.02)
        [session] = net.gateway.sessions.values()
        assert session.speed > 0
        waiting = [(await net.ask(tokens=100)).json for _ in range(3)]
        assert [reply["position"] for reply in waiting] == [0, 1, 2]
        times = [reply["eta_s"] for reply in waiting]
        assert times[0] == pytest.approx(60 / session.speed, abs=0.11)  # what the first one may still say
        assert times[2] - times[1] == pytest.approx(101 / session.speed, abs=0.11)
        shown = (await net.get(f"/v1/requests/{waiting[2]['id']}")).json
        assert (shown["position"], shown["state"]) == (2, "queued")
        assert shown["eta_s"] == pytest.approx(times[2], abs=0.11)
        reader = asyncio.create_task(net.events(waiting[2]["id"]))
        await until(lambda: net.gateway.metrics.readers == 1)
        await settle(net, first["id"], waiting[0]["id"], waiting[1]["id"], waiting[2]["id"])
        queued = (await reader)[0]
        assert (queued["kind"], queued["position"], queued["size"], queued["event_id"]) == ("queued", 2, 3, None)
        assert queued["eta_s"] == pytest.approx(times[2], abs=0.11)


@pytest.mark.parametrize(("model", "body", "why"), [
    ({"max_total": 64}, {"max_new_tokens": 100}, "101 tokens"),
    ({"features": ["resume"]}, {"max_new_tokens": 8, "grammar": GRAMMAR}, "grammar.regex"),
    ({"features": ["resume"]}, {"max_new_tokens": 8, "top_n_tokens": 2}, "top_n_tokens"),
])
async def test_what_no_worker_could_ever_run_is_refused_at_once(
    tmp_path: Path, model: dict[str, Any], body: dict[str, Any], why: str
) -> None:
    async with network(tmp_path, no_worker_wait=0) as net:
        refused = await net.post("/generate_stream", {"inputs": "x"})
        assert (refused.status, "no worker is connected" in refused.json["error"]) == (503, True)
        worker = await net.scripted(**model)
        await worker.next("welcome")
        for path in ("/generate", "/generate_stream", "/v1/requests"):
            refused = await net.post(path, {"inputs": "x", "parameters": body})
            assert refused.status == 503
            assert why in refused.raw.decode()
            assert int(refused.headers["Retry-After"]) > 0
        assert net.gateway.metrics.rejects == {"no_capacity": 4}
        assert net.gateway.broker.counts.accepted == 0
        able = await net.scripted()
        await able.next("welcome")
        job_id = (await net.post("/v1/requests", {"inputs": "x", "parameters": body})).json["id"]
        job = await able.next("job")  # not the other one, which is as free
        await finish(able, job)
        assert (await net.events(job_id))[-1]["kind"] == "done"


async def test_what_no_worker_can_run_may_wait_for_one_a_moment(tmp_path: Path) -> None:
    async with network(tmp_path, no_worker_wait=1.5) as net:
        small = await net.scripted(max_total=16)
        await small.next("welcome")
        lost = (await net.ask(tokens=100)).json["id"]
        events = await net.events(lost)
        assert (events[0]["kind"], events[-1]["kind"], events[-1]["code"]) == ("queued", "failed", "no_capacity")
        large = await net.scripted()
        await large.next("welcome")
        large.cut()
        await until(lambda: len(net.gateway.sessions) == 1)
        found = (await net.ask(tokens=100)).json["id"]  # there was one a moment ago
        large = await net.scripted()
        await finish(large, await large.next("job"))
        assert (await net.events(found))[-1]["kind"] == "done"


async def test_a_queue_that_is_full_by_tokens_refuses(tmp_path: Path) -> None:
    async with network(tmp_path, max_queue_tokens=250) as net:
        worker = await net.scripted()
        first = (await net.ask(tokens=100)).json["id"]
        await worker.next("job")
        replies = await asyncio.gather(*(net.ask(tokens=100) for _ in range(6)))
        assert sorted(reply.status for reply in replies) == [202] * 2 + [503] * 4
        stream = await net.post("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 100}})
        assert (stream.status, bool(stream.headers["Retry-After"])) == (503, True)  # no stream that ends with an error
        await settle(net, first, *(reply.json["id"] for reply in replies if reply.status == 202))


async def test_a_tenant_may_have_so_many_requests_whether_or_not_it_is_connected(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.anna]\nkeys = ["a"]\nmax_concurrent_requests = 2\n')
    async with network(tmp_path / "model", api_keys_file=str(keys)) as net:
        worker = await net.scripted()
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 8}}
        replies = [await net.post("/v1/requests", body, Authorization="Bearer a") for _ in range(3)]
        assert [reply.status for reply in replies] == [202, 202, 429]
        assert int(replies[2].headers["Retry-After"]) > 0
        await finish(worker, await worker.next("job"))
        await finish(worker, await worker.next("job"))
        await until(lambda: net.gateway.live == 0)
        assert (await net.post("/v1/requests", body, Authorization="Bearer a")).status == 202
        await finish(worker, await worker.next("job"))
        await until(lambda: net.gateway.live == 0)


# --- credits ---


async def test_a_worker_gets_no_more_than_the_slots_that_its_status_has(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        worker = await net.scripted(slots=8)
        await worker.next("welcome")
        await worker.send(t="status", running=[], slots_free=2)
        await until(lambda: next(iter(net.gateway.sessions.values())).free == 2)
        ids = [(await net.ask()).json["id"] for _ in range(4)]
        jobs = [await worker.next("job"), await worker.next("job")]
        assert (net.gateway.waiting, net.gateway.running) == (2, 2)
        running = [[job["job"], job["attempt"], 0] for job in jobs]
        await worker.send(t="status", running=running, slots_free=1)  # its owner needs less
        await worker.next("job")
        await worker.send(t="capacity", slots=0)  # and now all of it
        await worker.send(t="ping", n=7)
        assert (await worker.next("pong"))["n"] == 7
        await finish(worker, jobs[0])
        await until(lambda: net.gateway.running == 2)
        assert net.gateway.waiting == 1
        await settle(net, *ids)


async def test_a_worker_gets_no_more_than_its_free_kv_tokens(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        worker = await net.scripted(slots=8)
        await worker.next("welcome")
        await worker.send(t="status", running=[], slots_free=8, kv_free_tokens=250)
        await until(lambda: next(iter(net.gateway.sessions.values())).room(1.0) == 250)
        ids = [(await net.ask(tokens=100)).json["id"] for _ in range(3)]  # each may grow to 101
        jobs = [await worker.next("job"), await worker.next("job")]
        [session] = net.gateway.sessions.values()
        assert (session.room(1.0), net.gateway.waiting) == (48, 1)
        other = await net.scripted()
        third = await other.next("job")  # who has room takes it
        await worker.step(jobs[0], IDS)
        running = [[job["job"], job["attempt"], n] for job, n in zip(jobs, (4, 0), strict=True)]
        await until(lambda: session.tokens == 4)
        await worker.send(t="status", running=running, slots_free=6, kv_free_tokens=1000)
        await until(lambda: session.room(1.0) == 1000 + 1 + 4 + 1 - 202)
        assert session.room(0.5) == 2 * 1006 - 202  # where requests use half of what they may
        await finish(other, third)
        await settle(net, *ids[:2])


async def test_a_worker_that_says_nothing_of_a_job_loses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.network.session.ACCEPT_SECONDS", 0.3)
    async with network(tmp_path) as net:
        silent = await net.scripted()
        job_id = (await net.ask()).json["id"]
        await silent.next("job")
        other = await net.scripted()
        job = await other.next("job")
        assert (await silent.next("cancel"))["reason"] == "stale"
        assert job["attempt"] == 2
        await other.send(t="accept", job=job_id, attempt=2)
        await asyncio.sleep(0.6)
        await finish(other, job)
        assert (await net.events(job_id))[-1]["kind"] == "done"
        assert net.gateway.broker.counts.redeliveries == {"no_accept": 1}


@pytest.mark.parametrize(("code", "again"), [("busy", True), ("unsupported", False), ("draining", False)])
async def test_a_refusal_says_whether_the_worker_rests(tmp_path: Path, code: str, again: bool) -> None:
    async with network(tmp_path) as net:
        worker, other = await net.scripted(slots=2), None
        job_id = (await net.ask()).json["id"]
        job = await worker.next("job")
        await worker.send(t="nack", job=job_id, attempt=job["attempt"], code=code)
        await until(lambda: net.gateway.waiting == 1 or code == "unsupported")
        [session] = net.gateway.sessions.values()
        assert (session.state == "leaving") == (code == "draining")
        if code == "unsupported":  # for nothing but this job, and nobody else is there
            assert (await worker.next("job"))["attempt"] == 2
        assert session.resting == (code != "unsupported")
        other = await net.scripted(features=FEATURES)
        if code != "unsupported":
            await finish(other, await other.next("job"))
        else:
            await settle(net, job_id)
        await until(lambda: net.gateway.live == 0)
