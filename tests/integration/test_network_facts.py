"""What a gateway passes on, counts and logs: cached tokens and times of its workers, traces, metrics."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace._common.logs import ORIGIN
from tests.fakes.network import Net, network
from tests.fakes.routers import until

IDS = [40, 41, 42, 43]
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


async def numbers(net: Net) -> dict[str, float]:
    """Samples by name and labels, as Prometheus reads them."""
    text = (await net.get("/metrics")).raw.decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(names) == len(set(names))
    made = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model")
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in made
            made[key] = sample.value
    return made


async def test_cached_tokens_and_times_of_the_worker_reach_the_client(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        _, shard = await net.worker()
        shard.cached_tokens = 1
        whole = await net.post("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 4}})
        assert whole.headers["x-cached-tokens"] == "1"
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stop": ["zzz"]}
        usage = (await net.post("/v1/chat/completions", body)).json["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
        job_id = (await net.ask(tokens=4)).json["id"]
        usage = (await net.events(job_id))[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["cached_tokens"]) == (1, 4, 1)
        assert usage["queue_s"] >= 0
        assert usage["inference_s"] >= 0.003  # three steps of a millisecond after the first token


async def test_the_workers_own_queue_counts_as_waiting_and_its_claims_are_bounded(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        worker = await net.scripted()
        for cached, waited, shown in ((5, 0.1, 1), (-5, -1.0, 0), (10**9, 10.0**9, 1)):
            job_id = (await net.ask()).json["id"]
            job = await worker.next("job")
            await asyncio.sleep(0.15)
            step = [[job_id, 1, 0, IDS[0], -0.5, 0, []]]
            await worker.send(t="step", x=step, begun=[[job_id, 1, cached, waited]])
            await worker.done(job)
            usage = (await net.events(job_id))[-1]["usage"]
            assert usage["cached_tokens"] == shown  # of a prompt of one
            assert usage["inference_s"] >= 0
            assert (usage["queue_s"] >= 0.1) == (waited > 0)
            assert usage["queue_s"] < 5


async def test_a_trace_and_one_id_go_through_every_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The worker's lines and the gateway's name the same request and trace; no process logs what users wrote."""
    heard: list[tuple[str, str, str | None]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            origin = ORIGIN.get()
            if origin is not None:
                heard.append((record.name.rsplit(".", 1)[1], origin.request_id, origin.trace_id))

    listener = Listener()
    caplog.set_level("INFO")
    logging.getLogger().addHandler(listener)
    try:
        async with network(tmp_path) as net:
            await net.worker()
            body = {"inputs": "zq7secret", "parameters": {"max_new_tokens": 4}}
            reply = await net.post("/generate_stream", body, traceparent=PARENT)
            name = reply.headers["X-Request-Id"]
            await until(lambda: [module for module, _, _ in heard].count("agent") == 2)
    finally:
        logging.getLogger().removeHandler(listener)
    about = {(module, trace) for module, request, trace in heard if request == name}
    assert about >= {("session", TRACE), ("service", TRACE), ("agent", TRACE)}
    assert re.search(f"job {name}, attempt 1, goes to worker", caplog.text)
    assert "zq7secret" not in caplog.text


async def test_a_worker_is_told_the_trace_and_nothing_else_of_the_client(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        worker = await net.scripted()
        asked = asyncio.create_task(net.post("/generate", {"inputs": "x"}, traceparent=PARENT, **{"X-Request-Id": "mine-17"}))
        job = await worker.next("job")
        assert job["trace"] == PARENT
        assert "mine-17" not in str(job)
        await worker.done(job)
        await asked
        asked = asyncio.create_task(net.post("/generate", {"inputs": "x"}, traceparent="no trace"))
        job = await worker.next("job")
        assert job["trace"] is None
        await worker.done(job)
        await asked


async def test_every_request_is_accounted_for(tmp_path: Path) -> None:
    async with network(tmp_path, max_queue_size=3) as net:
        worker = await net.scripted()
        await net.ask(tokens=8)
        first = await worker.next("job")
        waiting = [(await net.ask()).json["id"] for _ in range(3)]
        assert (await net.ask()).status == 503
        seen = await numbers(net)
        assert (seen["wn_accepted_total"], seen["wn_live"], seen["wn_unaccounted"]) == (4, 4, 0)
        assert (seen["wn_queue_depth{class=chat}"], seen["wn_queue_depth{class=agent}"], seen["wn_running"]) == (3, 0, 1)
        assert seen["wn_queue_tokens"] == 27
        assert seen["wn_admission_rejects_total{reason=queue}"] == 1
        await worker.step(first, IDS[:2])
        await worker.step(first, IDS[:2], index=0)
        assert await net.delete(f"/v1/requests/{first['job']}") == 204
        cancelled = await worker.next("cancel")
        await worker.done(cancelled, "cancelled")
        job = await worker.next("job")
        await worker.send(t="fail", job=job["job"], attempt=1, code="bad_request", retriable=False)
        job = await worker.next("job")
        await worker.step(job, IDS[:1])
        worker.cut()
        other = await net.scripted()
        job = await other.next("job")
        reader = asyncio.create_task(net.events(job["job"], **{"Last-Event-ID": "1-1"}))
        await until(lambda: net.gateway.metrics.readers == 1)
        assert (await numbers(net))["wn_sse_readers"] == 1
        await other.step(job, IDS[1:])
        await other.done(job)
        await reader
        last = await other.next("job")
        await other.done(last)
        await until(lambda: net.gateway.live == 0)
        seen = await numbers(net)
        kinds = {kind: seen[f"wn_terminal_events_total{{kind={kind}}}"] for kind in ("done", "failed", "cancelled", "expired")}
        assert kinds == {"done": 2, "failed": 1, "cancelled": 1, "expired": 0}
        assert {seen[f"wn_requests_total{{outcome={kind},tenant_class=chat}}"] == n for kind, n in kinds.items()} == {True}
        assert (seen["wn_accepted_total"], seen["wn_live"], seen["wn_unaccounted"]) == (4, 0, 0)
        assert (seen["wn_attempts_count"], seen["wn_attempts_sum"]) == (4, 5)
        assert seen["wn_queue_wait_seconds_count"] == 4
        assert seen["wn_ttft_seconds_count"] == 2
        assert (seen["wn_itl_seconds_count{side=client}"], seen["wn_itl_seconds_count{side=worker}"]) == (1, 0)
        assert seen["wn_redeliveries_total{reason=disconnect}"] == 1
        assert seen["wn_resume_tokens_total"] == 1
        assert seen["wn_duplicate_events_total"] == 2
        assert (seen["wn_sse_resumes_total"], seen["wn_sse_readers"]) == (1, 0)
        assert seen["wn_cancel_latency_seconds_count"] == 1
        assert seen["wn_worker_slots{state=granted}"] == 1
        assert waiting


async def test_the_way_to_a_worker_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.network.frames.HEARTBEAT", 0.3)
    async with network(tmp_path) as net:
        worker = await net.scripted()
        ping = await worker.next("ping")
        await worker.send(t="pong", n=ping["n"] + 1)  # of another one: nothing is known by that
        await worker.send(t="pong", n=ping["n"])
        await worker.send(t="pong", n=ping["n"])
        await until(lambda: net.gateway.metrics.round_trip.total > 0)
        assert (await numbers(net))["wn_worker_rtt_seconds_count"] == 1
        assert (await net.get("/v1/workers")).json["workers"][0]["round_trip_ms"] > 0
