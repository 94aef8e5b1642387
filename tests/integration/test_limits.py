"""Tenants, their limits, deadlines, full queues, request ids and origins, at a router before a scripted shard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_router import tenants as tenants_module
from headrace_router.pace import ENOUGH
from tests.fakes.routers import Reply, Running, running, until
from tests.fakes.scripted_shard import ScriptedShard
from tests.fakes.text_models import write_text_model

Start = Callable[..., contextlib.AbstractAsyncContextManager[Running]]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SLOW = 0.005  # seconds of a step


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """start(shard, keys=TOML, …): a router with this keys file."""
    write_text_model(tmp_path)

    def make(
        shard: ScriptedShard | None = None, keys: str | None = None, **settings: Any
    ) -> contextlib.AbstractAsyncContextManager[Running]:
        if keys is not None:
            settings["api_keys_file"] = str(write_keys(tmp_path, keys))
        return running(tmp_path, shard, **settings)

    return make


def write_keys(folder: Path, keys: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(keys, "utf-8")
    path.chmod(0o600)
    return path


def body(tokens: int, text: str = "hello") -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": tokens}}


async def metrics(server: Running) -> set[str]:
    return set((await server.get("/metrics")).raw.decode().splitlines())


def retry_after(reply: Reply) -> int:
    assert reply.headers["Retry-After"].isdigit()
    return int(reply.headers["Retry-After"])


# --- keys ---


async def test_tenants_by_key(start: Start) -> None:
    keys = '[tenants.a]\nkeys = ["ka"]\nclasses = ["document"]\n[tenants.b]\nkeys = ["kb"]\ncache_salt = "s"\n'
    async with start(keys=keys, api_key="own") as server:
        assert (await server.post("/generate", body(1))).status == 401
        salts = {"ka": ("a", 0), "kb": ("s", 2), "own": ("", 2)}
        for key, (salt, priority) in salts.items():
            assert (await server.post("/generate", body(1), **{"x-api-key": key})).status == 200
            sent = server.shard.prefills[-1].requests[0]
            assert (sent.cache_salt, sent.priority) == (salt, priority)
        reply = await server.post("/generate", body(1), Authorization="Bearer ka", **{"X-Headrace-Class": "chat"})
        assert (reply.status, reply.json["error_type"]) == (403, "permission")
        reply = await server.post("/v1/chat/completions", CHAT, Authorization="Bearer ka", **{"X-Headrace-Class": "chat"})
        assert (reply.status, reply.json["error"]["type"]) == (403, "permission_error")
        lines = await metrics(server)
        assert 'tgi_tenant_prompt_tokens{tenant="a"} 1' in lines
        assert 'tgi_tenant_generated_tokens{tenant="default"} 1' in lines


async def test_refusals_have_the_shape_of_their_api(start: Start) -> None:
    async with start(api_key="own") as server:
        native, openai = await server.post("/generate", body(1)), await server.post("/v1/chat/completions", CHAT)
        assert (native.status, native.json["error_type"]) == (401, "authentication")
        assert (openai.status, openai.json["error"]["code"]) == (401, "invalid_api_key")
        assert native.headers["WWW-Authenticate"] == openai.headers["WWW-Authenticate"] == "Bearer"


async def test_keys_change_while_the_service_runs(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants_module, "WATCH_SECONDS", 0.01)
    async with start(keys='[tenants.a]\nkeys = ["k1"]\n') as server:
        stream = await server.session.post(server.url + "/generate_stream", json=body(30), headers={"x-api-key": "k1"})
        write_keys(tmp_path, '[tenants.a]\nkeys = ["key-2"]\n')
        async with asyncio.timeout(5):
            while (await server.post("/generate", body(1), **{"x-api-key": "key-2"})).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await server.post("/generate", body(1), **{"x-api-key": "k1"})).status == 401
        assert (await stream.content.read()).count(b"data: ") == 30  # what was accepted goes on


# --- rates ---


async def test_requests_per_minute(start: Start) -> None:
    async with start(keys='[tenants.a]\nkeys = ["k"]\nrequests_per_minute = 2\n') as server:
        key = {"Authorization": "Bearer k"}
        first = await server.post("/generate", body(1), **key)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        stream = await server.post("/generate_stream", body(1), **key)
        assert stream.headers["x-ratelimit-remaining-requests"] == "0"
        native = await server.post("/generate", body(1), **key)
        assert (native.status, native.json["error_type"]) == (429, "rate_limited")
        assert 1 <= retry_after(native) <= 30
        openai = await server.post("/v1/chat/completions", {**CHAT, "stream": True}, **key)
        assert (openai.status, openai.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "x-ratelimit-reset-requests" in openai.headers
        assert "tgi_request_success 2" in await metrics(server)
        assert 'tgi_request_refused{tenant="a",class="chat",reason="requests"} 2' in await metrics(server)
        assert (await server.get("/health")).status == 200


async def test_tokens_per_minute(start: Start) -> None:
    async with start(keys='[tenants.a]\nkeys = ["k"]\ntokens_per_minute = 100\n') as server:
        key = {"Authorization": "Bearer k"}
        reply = await server.post("/generate", body(90), **key)
        assert (reply.status, reply.headers["x-ratelimit-remaining-tokens"]) == (200, "9")  # 1 of the prompt
        prompt = "one two three four five six " * 8
        refused = await server.post("/generate_stream", body(1, prompt), **key)
        assert (refused.status, refused.json["error_type"]) == (429, "rate_limited")
        assert retry_after(refused) > 1
        assert (await server.post("/generate", body(1), **key)).status == 200
        lines = await metrics(server)
        assert 'tgi_request_refused{tenant="a",class="chat",reason="tokens"} 1' in lines
        assert 'tgi_request_failure{err="rate_limited"} 1' in lines


async def test_tokens_that_were_never_computed_are_given_back(start: Start) -> None:
    shard = ScriptedShard()
    async with start(shard, keys='[tenants.a]\nkeys = ["k"]\ntokens_per_minute = 1000\n') as server:
        shard.room = 0
        headers = {"Authorization": "Bearer k", "X-Request-Timeout-Ms": "50"}
        waiting = await server.post("/generate", body(1, "one two three " * 20), **headers)
        assert waiting.status == 408
        assert waiting.headers["x-ratelimit-remaining-tokens"] == "1000"
        shard.room = 9
        stream = await server.session.post(server.url + "/generate_stream", json=body(900), headers={"x-api-key": "k"})
        await stream.content.readline()
        stream.close()
        await server.settled()
        left = server.router.service.meters.of(next(iter(server.router._tenants._by_key.values()))).headers()
        assert int(left["x-ratelimit-remaining-tokens"]) < 1000  # what was computed is not


async def test_concurrent_requests_of_a_tenant(start: Start) -> None:
    keys = '[tenants.a]\nkeys = ["ka"]\nmax_concurrent_requests = 1\n[tenants.b]\nkeys = ["kb"]\n'
    async with start(ScriptedShard(step_seconds=SLOW), keys=keys) as server:
        stream = await server.session.post(server.url + "/generate_stream", json=body(500), headers={"x-api-key": "ka"})
        reply = await server.post("/generate", body(1), **{"x-api-key": "ka"})
        assert (reply.status, retry_after(reply)) == (429, 1)
        assert (await server.post("/generate", body(1), **{"x-api-key": "kb"})).status == 200
        stream.close()
        await server.settled()
        await until(lambda: all(meter.active == 0 for meter in server.router.service.meters._by_name.values()))
        assert (await server.post("/generate", body(1), **{"x-api-key": "ka"})).status == 200


# --- a full service ---


async def test_no_permit_is_left(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=SLOW), max_concurrent_requests=1) as server:
        assert (await server.generate(tokens=40)).status == 200
        stream = await server.start_stream(tokens=900)
        for reply in (await server.generate(), await server.post("/v1/chat/completions", CHAT)):
            assert reply.status == 429
            assert retry_after(reply) == 1
        stream.close()
        await server.settled()
        assert 'tgi_request_refused{tenant="anonymous",class="chat",reason="overloaded"} 2' in await metrics(server)


async def test_the_queue_is_full(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=SLOW), max_batch_size=1, max_queue_size=2) as server:
        stream = await server.start_stream(tokens=900)
        queued = [asyncio.create_task(server.generate(str(i), 1)) for i in range(2)]
        await until(lambda: server.router.batcher.waiting == 2)
        native = await server.generate()
        assert (native.status, native.json["error_type"]) == (503, "overloaded")
        openai = await server.post("/v1/chat/completions", {**CHAT, "stream": True})
        assert (openai.status, openai.json["error"]["type"]) == (503, "overloaded_error")
        assert retry_after(native) >= 1
        stream.close()
        assert [reply.status for reply in await asyncio.gather(*queued)] == [200, 200]
        assert 'tgi_request_refused{tenant="anonymous",class="chat",reason="queue"} 2' in await metrics(server)


async def test_a_burst_that_fits_is_not_refused(start: Start) -> None:
    async with start(max_batch_size=8, max_queue_size=1) as server:
        replies = await asyncio.gather(*(server.generate(str(i), 3) for i in range(8)))
        assert [reply.status for reply in replies] == [200] * 8


# --- deadlines ---


async def test_queued_work_that_is_too_late_is_dropped_before_its_prefill(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=SLOW), max_batch_size=1) as server:
        stream = await server.start_stream(tokens=900)
        prefills = len(server.shard.prefills)
        timeout = {"X-Request-Timeout-Ms": "60"}
        replies = await asyncio.gather(
            server.post("/generate", body(5), **timeout), server.post("/v1/chat/completions", CHAT, **timeout),
            server.post("/generate_stream", body(5), **timeout),
            server.post("/v1/chat/completions", {**CHAT, "stream": True}, **timeout),
        )
        assert [reply.status for reply in replies] == [408, 408, 200, 200]
        assert replies[0].json["error_type"] == replies[2].events[0]["error_type"] == "timeout"
        assert replies[1].json["error"]["type"] == replies[3].events[0]["error"]["type"] == "timeout_error"
        assert [len(reply.events) for reply in replies[2:]] == [1, 1]
        assert [reply.done for reply in replies[2:]] == [0, 1]
        assert server.router.batcher.waiting == 0
        stream.close()
        await server.settled()
        assert len(server.shard.prefills) == prefills
        lines = await metrics(server)
        assert 'tgi_request_late{tenant="anonymous",class="chat",stage="waiting"} 4' in lines
        assert 'tgi_request_failure{err="timeout"} 4' in lines


async def test_running_work_is_cancelled_at_its_deadline(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=SLOW)) as server:
        other = asyncio.create_task(server.generate("b", 60))
        reply = await server.post("/generate_stream", body(900), **{"X-Request-Timeout-Ms": "100"})
        assert 2 < len(reply.events) < 100
        assert [event for event in reply.events if "error" in event] == reply.events[-1:]
        assert reply.events[-1]["error_type"] == "timeout"
        assert (await server.post("/generate", body(900), **{"X-Request-Timeout-Ms": "50"})).status == 408
        assert (await other).json["details"]["generated_tokens"] == 60
        await server.settled()
        lines = await metrics(server)
        assert 'tgi_request_late{tenant="anonymous",class="chat",stage="running"} 2' in lines


async def test_work_in_time_is_not_disturbed(start: Start) -> None:
    async with start() as server:
        reply = await server.post("/generate_stream", body(20), **{"X-Request-Timeout-Ms": "60000"})
        assert len(reply.events) == 20
        reply = await server.post("/v1/completions", {"prompt": "x"}, **{"X-Request-Timeout-Ms": "soon"})
        assert (reply.status, reply.json["error"]["param"]) == (400, "X-Request-Timeout-Ms")
        assert (await server.post("/generate", body(1), **{"X-Request-Timeout-Ms": "0"})).status == 422


async def test_the_queue_is_bounded_by_tokens(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=SLOW), max_batch_size=1, max_queue_tokens=100) as server:
        stream = await server.start_stream(tokens=900)
        large = asyncio.create_task(server.generate("a", 300))  # alone: it may wait
        await until(lambda: server.router.batcher.waiting == 1)
        assert "headrace_queue_tokens 301" in await metrics(server)
        assert (await server.generate("b", 3)).status == 503
        large.cancel()
        await until(lambda: server.router.batcher.waiting == 0)
        queued = [asyncio.create_task(server.generate(str(i), 40)) for i in range(2)]
        await until(lambda: server.router.batcher.waiting == 2)
        assert (await server.generate("c", 40)).status == 503
        stream.close()
        assert [reply.status for reply in await asyncio.gather(*queued)] == [200, 200]
        assert "headrace_queue_tokens 0" in await metrics(server)


async def test_work_that_cannot_be_in_time_is_turned_away(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=SLOW), max_batch_size=1) as server:
        for _ in range(ENOUGH):
            server.router.service.forecast.ended("chat", 100, 100, 1.0)
        timeout = {"X-Request-Timeout-Ms": "500"}
        assert (await server.post("/generate", body(20), **timeout)).status == 200
        stream = await server.start_stream(tokens=900)
        prefills = len(server.shard.prefills)
        late = await server.post("/generate", body(200), **timeout)  # 2 s by the forecast
        assert (late.status, late.json["error_type"]) == (503, "overloaded")
        assert retry_after(late) >= 1
        other = asyncio.create_task(server.generate("b", 1))
        hopeless = await server.post("/generate_stream", body(20), **{"X-Request-Timeout-Ms": "2000"})
        assert hopeless.events[0]["error_type"] == "timeout"
        stream.close()
        assert (await other).status == 200
        await server.settled()
        assert len(server.shard.prefills) == prefills + 1
        lines = await metrics(server)
        assert 'tgi_request_refused{tenant="anonymous",class="chat",reason="deadline"} 1' in lines
        assert 'tgi_request_late{tenant="anonymous",class="chat",stage="hopeless"} 1' in lines


# --- ids and origins ---


async def test_every_answer_has_an_id(start: Start) -> None:
    async with start(api_key="own") as server:
        mine = {"X-Request-Id": "mine-1", "Authorization": "Bearer own"}
        for path, sent in (("/generate", body(1)), ("/generate_stream", body(1)), ("/nope", {}), ("/generate", {})):
            assert (await server.post(path, sent, **mine)).headers["X-Request-Id"] == "mine-1"
        assert (await server.post("/generate", body(1), **{"X-Request-Id": "mine-2"})).headers["X-Request-Id"] == "mine-2"
        replies = [await server.get(path) for path in ("/health", "/metrics", "/nope", "/docs")]
        assert len({reply.headers["X-Request-Id"] for reply in replies}) == 4


async def test_log_lines_name_the_request(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace._common import logs

    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with start() as server:
        logs.setup("router", "info", as_json=True)
        headers = {"X-Request-Id": "mine-1", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        await server.post("/generate", body(2), **headers)
        logs.setup("router", "info")
        await server.post("/generate", body(2), **headers)
        await server.post("/generate_stream", body(2), **headers)
        await server.post("/generate", body(2), **{"X-Request-Id": "forged\u2028id"})
        structured, plain, streamed, other = [line for line in capsys.readouterr().err.splitlines() if "prompt tokens" in line]
    assert json.loads(structured) | {"request_id": "mine-1", "trace_id": trace} == json.loads(structured)
    for line in (plain, streamed):
        assert line.startswith(f"INFO [mine-1 trace {trace}] request ")
    assert re.match(r"INFO \[[0-9a-f]{32}\] request ", other)


async def test_pages_in_browsers(start: Start) -> None:
    async with start(api_key="own", cors_allow_origin=("https://a.example",)) as server:
        preflight = {
            "Origin": "https://a.example", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-request-timeout-ms",
        }
        async with server.session.options(server.url + "/generate_stream", headers=preflight) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert response.headers["Access-Control-Allow-Headers"] == preflight["Access-Control-Request-Headers"]
            assert "Access-Control-Allow-Credentials" not in response.headers
        async with server.session.options(server.url + "/nope", headers=preflight) as response:
            assert response.status == 404
        async with server.session.options(server.url + "/generate") as response:
            assert response.status == 405
        key = {"Authorization": "Bearer own"}
        for path in ("/generate", "/generate_stream"):
            reply = await server.post(path, body(1), Origin="https://a.example", **key)
            assert reply.headers["Access-Control-Allow-Origin"] == "https://a.example"
            other = await server.post(path, body(1), Origin="https://b.example", **key)
            assert "Access-Control-Allow-Origin" not in other.headers
        assert "Access-Control-Allow-Origin" in (await server.post("/generate", body(1), Origin="https://a.example")).headers
