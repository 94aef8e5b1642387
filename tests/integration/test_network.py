"""A gateway with workers: what clients see when workers come, go, fail, lie and freeze."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace_router.types import GenerateRequest
from tests.fakes.network import Net, network
from tests.fakes.routers import until
from tests.fakes.scripted_shard import LOGPROB

IDS = [40, 41, 42, 43]


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Net]:
    async with network(tmp_path) as made:
        yield made
        await until(lambda: made.gateway.running + made.gateway.waiting == 0)


def tokens(events: list[dict[str, Any]]) -> list[int]:
    told = [event for event in events if event["kind"] == "token"]
    assert [event["index"] for event in told] == list(range(len(told)))
    return [event["id"] for event in told]


# --- whole workers ---


async def test_every_api_works_over_a_worker(net: Net) -> None:
    _, shard = await net.worker()
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 6, "details": True, "top_n_tokens": 2}}
    whole = (await net.post("/generate", body)).json
    assert [token["logprob"] for token in whole["details"]["tokens"]] == [LOGPROB] * 6
    assert whole["details"]["finish_reason"] == "length"
    assert len(whole["details"]["top_tokens"][0]) == 2
    stream = await net.post("/generate_stream", body)
    assert [event["token"] for event in stream.events] == whole["details"]["tokens"]
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    assert (await net.post("/v1/chat/completions", chat)).json["usage"]["completion_tokens"] == 5
    given = {"inputs": "hello", "parameters": {"max_new_tokens": 2, "decoder_input_details": True, "details": True}}
    assert [p["id"] for p in (await net.post("/generate", given)).json["details"]["prefill"]]
    assert shard.rows == 0


async def test_stop_strings_and_end_tokens_are_the_gateways(net: Net) -> None:
    _, shard = await net.worker()
    shard.script = lambda request, index: [ord("a") - 33 + 3, ord("b") - 33 + 3, ord("c") - 33 + 3, 2][min(index, 3)]
    body: dict[str, Any] = {"inputs": "hello", "parameters": {"max_new_tokens": 50, "details": True}}
    whole = (await net.post("/generate", body)).json
    assert whole["details"]["finish_reason"] == "eos_token"
    assert len(whole["details"]["tokens"]) == 4
    body["parameters"]["stop"] = [whole["generated_text"][1]]
    stopped = (await net.post("/generate", body)).json
    assert stopped["details"]["finish_reason"] == "stop_sequence"
    assert stopped["generated_text"] == whole["generated_text"][:2]
    await until(lambda: shard.rows == 0)


async def test_a_worker_that_goes_loses_nothing(net: Net) -> None:
    _, first = await net.worker(step_seconds=0.01)
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 100, "details": True}}
    calm = (await net.post("/generate", body)).json
    running = [asyncio.create_task(net.post("/generate_stream", body)) for _ in range(6)]
    await until(lambda: first.rows == 6)
    await asyncio.sleep(0.2)
    router, second = await net.worker(step_seconds=0.01)
    leaver, _ = net.workers[0]
    await leaver.drain()
    for reply in await asyncio.gather(*running):
        assert [event["token"] for event in reply.events] == calm["details"]["tokens"]
    resumed = [r for call in second.prefills for r in call.requests]
    assert resumed
    assert all(r.generated > 0 and len(r.token_ids.ids) == 1 + r.generated for r in resumed)
    assert router.batcher.running == 0


async def test_a_client_that_goes_frees_the_worker(tmp_path: Path) -> None:
    async with network(tmp_path, disconnect_grace=0) as net:
        _, shard = await net.worker(step_seconds=0.005)
        body = {"inputs": "x", "parameters": {"max_new_tokens": 900}}
        response = await net.session.post(net.url + "/generate_stream", json=body)
        await response.content.readline()
        assert shard.rows == 1
        response.close()
        await until(lambda: shard.rows == 0)


async def test_a_worker_of_another_model_is_told_both(net: Net) -> None:
    worker = await net.scripted(id="other-model")
    assert await worker.closed() == 4409
    assert worker.frames[-1]["message"] == "the model is scripted here, other-model there"
    worker = await net.scripted(tokenizer_hash="0" * 64)
    assert await worker.closed() == 4409
    assert "0" * 12 in worker.frames[-1]["message"]
    assert net.router.service.tokenizer_hash[:12] in worker.frames[-1]["message"]


# --- scripted workers ---


async def test_a_dropped_worker_is_followed_by_another(net: Net) -> None:
    worker = await net.scripted()
    job_id = (await net.ask()).json["id"]
    reader = asyncio.create_task(net.events(job_id))
    job = await worker.next("job")
    assert (job["job"], job["attempt"], job["rng_offset"]) == (job_id, 1, 0)
    await worker.step(job, IDS[:2])
    await until(lambda: net.gateway.sessions and next(iter(net.gateway.sessions.values())).tokens == 2)
    worker.cut()
    other = await net.scripted()
    again = await other.next("job")
    assert (again["job"], again["attempt"], again["rng_offset"]) == (job_id, 2, 2)
    assert again["input_ids"] == job["input_ids"] + IDS[:2]
    assert again["params"]["max_new_tokens"] == 6
    await other.step(again, IDS[2:])
    await other.done(again)
    events = await reader
    assert tokens(events) == IDS
    assert [e["kind"] for e in events if e["kind"] not in ("queued", "token")] == ["started", "resumed", "done"]
    assert events[-1]["finish_reason"] == "eos_token"
    assert await net.events(job_id) == [e for e in events if e["kind"] != "queued"]
    middle = next(e["event_id"] for e in events if e["kind"] == "token" and e["index"] == 1)
    rest = await net.events(job_id, **{"Last-Event-ID": middle})
    assert [e["kind"] for e in rest] == ["resumed", "token", "token", "done"]
    last = await net.get(f"/v1/requests/{job_id}/events", **{"Last-Event-ID": events[-1]["event_id"]})
    assert last.status == 204


async def test_a_zombie_changes_nothing(net: Net) -> None:
    zombie, other = await net.scripted(), await net.scripted()
    job_id = (await net.ask()).json["id"]
    job = await zombie.next("job")
    await zombie.step(job, IDS[:1])
    await zombie.send(t="fail", job=job_id, attempt=1, code="oom", retriable=True, message="no room")
    again = await other.next("job")
    await zombie.step(job, [99])
    await zombie.done(job)
    assert (await zombie.next("cancel"))["reason"] == "stale"
    await other.step(again, IDS[1:])
    await other.done(again)
    assert tokens(await net.events(job_id)) == IDS


async def test_resent_tokens_are_taken_once_and_a_gap_costs_the_job(net: Net) -> None:
    worker = await net.scripted()
    job_id = (await net.ask()).json["id"]
    job = await worker.next("job")
    await worker.step(job, IDS[:2])
    await worker.step(job, IDS[:3], index=0)
    await worker.step(job, [99], index=7)
    again = await worker.next("job")
    assert (again["attempt"], again["rng_offset"]) == (2, 3)
    await worker.step(again, IDS[3:])
    await worker.done(again)
    assert tokens(await net.events(job_id)) == IDS


async def test_a_busy_worker_is_left_alone_for_a_while(net: Net) -> None:
    worker = await net.scripted()
    job_id = (await net.ask()).json["id"]
    for _ in range(2):
        job = await worker.next("job")
        await worker.send(t="nack", job=job_id, attempt=job["attempt"], code="busy")
        assert (await net.get(f"/v1/requests/{job_id}")).json["attempt"] == job["attempt"]
    other = await net.scripted()
    job = await other.next("job")
    assert job["attempt"] == 3
    await other.done(job)


async def test_a_worker_that_leaves_does_not_come_back(net: Net) -> None:
    router, shard = await net.worker(step_seconds=0.005)
    local = asyncio.create_task(router.batcher.submit(GenerateRequest([40], 40)).read())
    await router.drain()
    await local
    await asyncio.sleep(0.8)  # longer than the first pause
    assert net.gateway.sessions == {}
    await until(lambda: shard.rows == 0)


async def test_garbage_costs_the_job_and_then_the_connection(net: Net) -> None:
    worker = await net.scripted()
    job_id = (await net.ask()).json["id"]
    job = await worker.next("job")
    await worker.step(job, [100_000])
    assert (await worker.next("job"))["attempt"] == 2
    await worker.send(t="something else", x=1)
    await worker.socket.send_str("no json")
    await worker.socket.send_str('{"t": "step", "x": 5}')
    assert await worker.closed() == 4400
    assert (await net.get(f"/v1/requests/{job_id}")).json["state"] == "queued"
    assert await net.delete(f"/v1/requests/{job_id}") == 204


async def test_poison_ends_with_a_clear_error(net: Net) -> None:
    worker = await net.scripted()
    job_id = (await net.ask()).json["id"]
    for _ in range(4):
        job = await worker.next("job")
        await worker.send(t="fail", job=job_id, attempt=job["attempt"], code="oom", retriable=True)
    events = await net.events(job_id)
    assert events[-1]["kind"] == "failed"
    assert events[-1]["code"] == "attempts_exhausted"
    state = (await net.get(f"/v1/requests/{job_id}")).json
    assert (state["state"], state["result"]["code"]) == ("failed", "attempts_exhausted")


async def test_cancel_reaches_the_queue_and_the_worker(net: Net) -> None:
    worker = await net.scripted()
    first, second, third = [(await net.ask()).json for _ in range(3)]
    assert (second["position"], third["position"]) == (0, 1)
    job = await worker.next("job")
    assert await net.delete(f"/v1/requests/{second['id']}") == 204
    assert (await net.get(f"/v1/requests/{third['id']}")).json["position"] == 0
    assert await net.delete(f"/v1/requests/{first['id']}") == 204
    assert (await worker.next("cancel"))["job"] == job["job"]
    job = await worker.next("job")
    assert job["job"] == third["id"]
    await worker.done(job)
    for request in (first, second):
        assert [e["kind"] for e in await net.events(request["id"])][-1] == "cancelled"


async def test_a_client_may_ask_again(net: Net) -> None:
    worker = await net.scripted()
    await worker.next("welcome")
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 8}}
    replies = await asyncio.gather(*(net.post("/v1/requests", body, **{"Idempotency-Key": "k"}) for _ in range(3)))
    assert [reply.status for reply in replies] == [202] * 3
    assert len({reply.json["id"] for reply in replies}) == 1
    other = await net.post("/v1/requests", {**body, "inputs": "else"}, **{"Idempotency-Key": "k"})
    assert other.status == 409
    job = await worker.next("job")
    await worker.done(job)
    assert net.gateway.broker.counts.accepted == 1


async def test_requests_belong_to_their_tenants(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.anna]\nkeys = ["a"]\n[tenants.otto]\nkeys = ["o"]\n')
    async with network(tmp_path / "model", api_keys_file=str(keys)) as net:
        assert (await net.ask()).status == 401
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 8}}
        job = (await net.post("/v1/requests", body, Authorization="Bearer a")).json["id"]
        for path in (f"/v1/requests/{job}", f"/v1/requests/{job}/events"):
            assert (await net.get(path)).status == 401
            assert (await net.get(path, Authorization="Bearer o")).status == 404
        assert (await net.get(f"/v1/requests/{job}", Authorization="Bearer a")).json["state"] == "queued"
        assert await net.delete(f"/v1/requests/{job}") == 401
        async with net.session.delete(f"{net.url}/v1/requests/{job}", headers={"Authorization": "Bearer a"}) as reply:
            assert reply.status == 204


async def test_a_full_queue_refuses_and_keeps_nothing(tmp_path: Path) -> None:
    async with network(tmp_path, max_queue_size=2) as net:
        worker = await net.scripted()
        first = await worker_has(net, worker)
        replies = await asyncio.gather(*(net.ask() for _ in range(4)))
        assert sorted(reply.status for reply in replies) == [202, 202, 503, 503]
        assert all(reply.headers["Retry-After"] for reply in replies if reply.status == 503)
        await worker.done(first)
        served = set()
        for _ in range(2):
            job = await worker.next("job")
            served.add(job["job"])
            await worker.done(job)
        assert served == {reply.json["id"] for reply in replies if reply.status == 202}
        await until(lambda: net.router.service.background == set())


async def worker_has(net: Net, worker: Any) -> Any:
    await net.ask()
    return await worker.next("job")


async def test_time_ends_what_waits_and_what_stalls(tmp_path: Path) -> None:
    async with network(tmp_path, max_queue_time=1.0, stall_timeout=0.6) as net:
        frozen = await net.scripted()
        job = await worker_has(net, frozen)
        late = (await net.ask()).json["id"]
        events = await net.events(late)
        assert (events[0]["kind"], events[-1]["kind"], events[-1]["which"]) == ("queued", "expired", "queue")
        await frozen.step(job, IDS[:1])
        other = await net.scripted()
        again = await other.next("job")
        assert (again["job"], again["rng_offset"]) == (job["job"], 1)
        await other.done(again)


async def test_without_workers_the_refusal_is_quick(tmp_path: Path) -> None:
    async with network(tmp_path, no_worker_wait=2.0) as net:
        early = (await net.ask()).json["id"]
        events = await net.events(early)
        assert (events[-1]["kind"], events[-1]["code"]) == ("failed", "no_capacity")
        assert (await net.ask()).status == 503
        assert (await net.post("/generate", {"inputs": "x"})).status == 503


async def test_who_may_not_join_is_told_before_the_upgrade(net: Net) -> None:
    async def status(**changes: Any) -> int:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await net.scripted(**changes)
        return caught.value.status

    assert await status(token="wk_wrong") == 401
    assert await status(protocol="headrace.worker.v0+json") == 426
    assert net.token_file.stat().st_mode & 0o777 == 0o600
    hashes = net.router.service.network.tokens  # type: ignore[union-attr]
    assert net.token not in hashes.path.read_text()
    worker = await net.scripted()
    await worker.next("welcome")
    hashes.__class__(str(net.token_file)).revoke(net.token.split("_")[1])
    with contextlib.suppress(AssertionError):
        await worker.next("welcome", 4)
    assert worker.socket.close_code == 4401
    assert await status() == 401


async def test_the_network_shows_itself(net: Net) -> None:
    worker = await net.scripted(slots=3)
    job = await worker_has(net, worker)
    state = (await net.get("/v1/workers")).json
    assert [(w["slots"], w["running"], w["weight_format"]) for w in state["workers"]] == [(3, 1, "f32")]
    assert net.token not in str(state)
    metrics = (await net.get("/metrics")).raw.decode()
    assert 'wn_workers{tier="owner",model="scripted",state="working"} 1' in metrics
    assert "wn_worker_slots{state=\"used\"} 1" in metrics
    await worker.done(job)
