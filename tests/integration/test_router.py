"""The router against a scripted shard: streams, errors, cancellation, lost and preempted batches, drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from headrace._common.errors import GenerationFailed
from headrace.v1 import generation_pb2 as pb
from headrace_router import sse
from headrace_router.app import PUBLIC
from headrace_router.text.pool import TextPool
from headrace_router.types import GenerateRequest
from tests.fakes.routers import Running, running, until
from tests.fakes.scripted_shard import ScriptedShard, cycle
from tests.fakes.text_models import EOS_ID, write_text_model

Start = Callable[..., contextlib.AbstractAsyncContextManager[Running]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a router on a fresh model folder."""
    write_text_model(tmp_path)

    def make(shard: ScriptedShard | None = None, **settings: Any) -> contextlib.AbstractAsyncContextManager[Running]:
        return running(tmp_path, shard, **settings)

    return make


@pytest.fixture
async def server(start: Start) -> AsyncIterator[Running]:
    async with start() as made:
        yield made
        await made.settled()


def say(pool: TextPool, text: str, end: bool = True) -> list[int]:
    ids = pool.tokenizer.encode(text, add_special_tokens=False)
    return [*ids, EOS_ID] if end else ids


def scripted(shard: ScriptedShard, ids: list[int]) -> None:
    """Have the shard say these tokens, then end tokens."""
    shard.script = lambda request, index: ids[index] if index < len(ids) else EOS_ID


# --- native ---


async def test_generate_and_stream_agree(server: Running) -> None:
    whole = await server.generate(tokens=20)
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 20, "details": True}}
    stream = await server.post("/generate_stream", body)
    events = stream.events
    assert [e["index"] for e in events] == list(range(1, 21))
    assert [e["token"] for e in events] == whole.json["details"]["tokens"]
    assert "".join(e["token"]["text"] for e in events) == whole.json["generated_text"]
    assert all(e["generated_text"] is None and e["details"] is None for e in events[:-1])
    assert events[-1]["generated_text"] == whole.json["generated_text"]
    assert events[-1]["details"] == {"finish_reason": "length", "generated_tokens": 20, "seed": None, "input_length": 1}
    assert stream.headers["Content-Type"] == "text/event-stream"
    assert stream.headers["Cache-Control"] == "no-cache"
    assert stream.headers["X-Accel-Buffering"] == "no"
    assert "Content-Length" not in stream.headers
    assert stream.done == 0


async def test_details(server: Running) -> None:
    reply = await server.generate("hello one", 3, top_n_tokens=2, decoder_input_details=True)
    details = reply.json["details"]
    assert [p["logprob"] for p in details["prefill"]] == [None, *(-1.0 for _ in details["prefill"][1:])]
    assert "".join(p["text"] for p in details["prefill"]) == "hello one"
    assert [len(top) for top in details["top_tokens"]] == [2, 2, 2]
    assert [top[0]["id"] for top in details["top_tokens"]] == [t["id"] for t in details["tokens"]]
    assert reply.headers["x-prompt-tokens"] == str(len(details["prefill"]))
    assert reply.headers["x-generated-tokens"] == "3"
    assert reply.headers["x-compute-type"] == "cpu"
    for name in ("total-time", "validation-time", "queue-time", "inference-time", "time-per-token"):
        assert reply.headers[f"x-{name}"].isdigit()


async def test_compat_route(server: Running) -> None:
    whole = await server.post("/", {"inputs": "hello", "parameters": {"max_new_tokens": 2}})
    assert isinstance(whole.json, list)
    assert whole.json[0]["generated_text"].startswith("hello")
    stream = await server.post("/", {"inputs": "hello", "parameters": {"max_new_tokens": 2}, "stream": True})
    assert stream.events[-1]["generated_text"] == whole.json[0]["generated_text"]


async def test_sampling_is_the_default_only_without_parameters(server: Running) -> None:
    await server.post("/generate", {"inputs": "hello"})
    seeded = server.shard.prefills[-1].requests[0].sampling
    assert seeded.do_sample
    assert seeded.HasField("seed")
    await server.post("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 1}})
    assert not server.shard.prefills[-1].requests[0].sampling.do_sample
    reply = await server.generate(tokens=1, temperature=0.5)
    assert server.shard.prefills[-1].requests[0].sampling.do_sample
    assert reply.json["details"]["seed"] == server.shard.prefills[-1].requests[0].sampling.seed
    assert (await server.generate(tokens=1, do_sample=True, seed=2**64 - 1)).json["details"]["seed"] == 2**64 - 1


async def test_fields_are_sent_only_when_set(server: Running) -> None:
    await server.generate(tokens=1)
    request = server.shard.prefills[-1].requests[0]
    assert not request.sampling.ListFields()
    assert not request.HasField("want")
    assert [f.name for f, _ in request.stopping.ListFields()] == ["max_new_tokens"]


async def test_truncate_keeps_the_right_end(server: Running) -> None:
    await server.generate("one two three four", 1, truncate=2)
    sent = list(server.shard.prefills[-1].requests[0].token_ids.ids)
    assert sent == server.router.service.text.tokenizer.encode("one two three four")[-2:]


async def test_the_end_token_shows_but_adds_no_text(server: Running) -> None:
    scripted(server.shard, say(server.router.service.text, "hello"))
    reply = await server.generate(tokens=20)
    assert reply.json["generated_text"] == "hello"
    assert reply.json["details"]["finish_reason"] == "eos_token"
    last = reply.json["details"]["tokens"][-1]
    assert (last["id"], last["special"], last["text"]) == (EOS_ID, True, "<|im_end|>")


@pytest.mark.parametrize("stop", ["y is b", "ky is", "blue"])
async def test_stop_strings_over_tokens(server: Running, stop: str) -> None:
    text = "the sky is blue and the sea"
    scripted(server.shard, say(server.router.service.text, text))
    native = await server.generate(tokens=200, stop=[stop])
    assert native.json["generated_text"] == text[: text.index(stop) + len(stop)]
    assert native.json["details"]["finish_reason"] == "stop_sequence"
    body = {"inputs": "x", "parameters": {"max_new_tokens": 200, "stop": [stop]}}
    events = (await server.post("/generate_stream", body)).events
    assert "".join(e["token"]["text"] for e in events) == events[-1]["generated_text"] == native.json["generated_text"]
    cut = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 200, "stop": stop})
    assert cut.json["choices"][0]["text"] == text[: text.index(stop)]
    assert cut.json["choices"][0]["finish_reason"] == "stop"
    cut_body = {"prompt": "x", "max_tokens": 200, "stop": stop, "stream": True}
    events = (await server.post("/v1/completions", cut_body)).events
    assert "".join(e["choices"][0]["text"] for e in events) == text[: text.index(stop)]
    await server.settled()


async def test_characters_are_whole(server: Running) -> None:
    text = "\u00e9\U0001f600\u6f22 x"
    scripted(server.shard, say(server.router.service.text, text))
    events = (await server.post("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 50}})).events
    assert "".join(e["token"]["text"] for e in events[:-1]) == text
    assert events[-1]["generated_text"] == text


async def test_half_a_character_goes_into_the_last_token(server: Running) -> None:
    ids = say(server.router.service.text, "\U0001f600", end=False)[:-1]
    scripted(server.shard, ids)
    reply = await server.generate(tokens=len(ids))
    assert [t["text"] for t in reply.json["details"]["tokens"]] == [*([""] * (len(ids) - 1)), "\ufffd"]
    assert reply.json["generated_text"] == "\ufffd"


@pytest.mark.parametrize(("parameters", "text"), [
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"), ({"top_p": 1e-60}, "`top_p`"), ({"typical_p": 1e-60}, "`typical_p`"),
    ({"temperature": 1e7}, "`temperature` must be <= 1000000"), ({"repetition_penalty": 1e7}, "`repetition_penalty`"),
    ({"max_new_tokens": 1024}, "`inputs` tokens + `max_new_tokens` must be <= 1024. Given: 1 `inputs` tokens and 1024"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 1023. Given: 0"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"), ({"stop": [""]}, "`stop`"),
    ({"seed": 2**64}, "`seed`"), ({"adapter_id": "x"}, "`adapter_id`"),
    ({"grammar": {"type": "regex", "value": "a**"}}, "`grammar` is not valid: at 3"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
])
async def test_native_refusals(server: Running, parameters: dict[str, Any], text: str) -> None:
    for path in ("/generate", "/generate_stream"):
        reply = await server.post(path, {"inputs": "hello", "parameters": parameters})
        assert reply.status == 422
        assert reply.json["error_type"] == "validation"
        if path == "/generate" or "best_of" not in parameters:
            assert reply.json["error"].startswith(f"Input validation error: {text}")
    assert not server.shard.prefills


async def test_tokenize(server: Running) -> None:
    text = "h\u00e9llo \U0001f600 one"
    reply = await server.post("/tokenize", {"inputs": text})
    assert all(t["text"] == text[t["start"] : t["stop"]] for t in reply.json)
    assert (await server.post("/tokenize", {"inputs": ""})).status == 422


@pytest.mark.parametrize(("raw", "headers", "status"), [
    (b"", {"Content-Type": "application/json"}, 400), (b'{"inputs":"a"', {"Content-Type": "application/json"}, 400),
    (b'{"inputs":"a"}', {"Content-Type": "text/plain"}, 415), (b'{"inputs":"a"}', {}, 415),
    (b'{"inputs":1}', {"Content-Type": "application/json; charset=utf-8"}, 422),
])
async def test_bad_bodies(server: Running, raw: bytes, headers: dict[str, str], status: int) -> None:
    post = server.session.post(server.url + "/generate", data=raw, headers=headers, skip_auto_headers=["Content-Type"])
    async with post as response:
        assert response.status == status
        assert (await response.json())["error_type"] == "validation"


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_large_bodies_are_refused_at_once(start: Start, path: str) -> None:
    async with start(payload_limit=1000) as server:
        assert (await server.post(path, {"inputs": "x" * 2000})).status == 413

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 100

        json_type = {"Content-Type": "application/json"}
        async with server.session.post(server.url + path, data=chunks(), headers=json_type) as response:
            assert response.status == 413


async def test_routes_that_are_not_there(server: Running) -> None:
    assert (await server.post("/nope", {})).json["error_type"] == "not_found"
    reply = await server.get("/generate")
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    assert "error" in (await server.get("/v1/nope")).json


# --- OpenAI ---

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_chat_stream(server: Running) -> None:
    scripted(server.shard, say(server.router.service.text, "hello there"))
    whole = await server.post("/v1/chat/completions", CHAT)
    message = whole.json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "hello there"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await server.post("/v1/chat/completions", {**CHAT, **options})
    events = stream.events
    assert stream.raw.endswith(b"data: [DONE]\n\n")
    assert stream.done == 1
    assert len({e["id"] for e in events}) == len({e["created"] for e in events}) == 1
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    choices = [c for e in events for c in e["choices"]]
    assert sum("role" in c["delta"] for c in choices) == 1
    assert "".join(c["delta"].get("content", "") for c in choices) == "hello there"
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole.json["usage"]
    assert not any(e.get("usage") for e in events[:-1])
    assert b"im_end" not in stream.raw


async def test_the_first_token_is_the_end(server: Running) -> None:
    scripted(server.shard, [])
    stream = await server.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert [c["finish_reason"] for e in stream.events for c in e["choices"]] == [None, "stop"]
    assert (await server.post("/v1/chat/completions", CHAT)).json["choices"][0]["message"]["content"] == ""


async def test_completions_of_several_prompts(server: Running) -> None:
    body = {"prompt": ["one", "two"], "max_tokens": 6, "temperature": 0}
    whole = await server.post("/v1/completions", body)
    assert [c["index"] for c in whole.json["choices"]] == [0, 1]
    stream = await server.post("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    choices = [c for e in stream.events for c in e["choices"]]
    for index in (0, 1):
        text = "".join(c["text"] for c in choices if c["index"] == index)
        assert text == whole.json["choices"][index]["text"]
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1]
    assert stream.events[-1]["usage"] == whole.json["usage"]
    ids = server.router.service.text.tokenizer.encode("one")
    by_ids = await server.post("/v1/completions", {**body, "prompt": ids})
    assert by_ids.json["choices"][0]["text"] == whole.json["choices"][0]["text"]


async def test_default_lengths(server: Running) -> None:
    assert (await server.post("/v1/completions", {"prompt": "x"})).json["usage"]["completion_tokens"] == 16
    assert (await server.post("/v1/chat/completions", CHAT)).json["usage"]["total_tokens"] == 1024


async def test_openai_sampling_fields(server: Running) -> None:
    await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1})
    assert server.shard.prefills[-1].requests[0].sampling.do_sample
    body = {**CHAT, "max_tokens": 1, "temperature": 0, "top_p": 1, "presence_penalty": 1.5, "logit_bias": {"7": -5}}
    await server.post("/v1/chat/completions", body)
    sent = server.shard.prefills[-1].requests[0].sampling
    assert {f.name for f, _ in sent.ListFields()} == {"presence_penalty", "logit_bias"}
    assert dict(sent.logit_bias) == {7: -5}
    await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, "seed": -1})
    assert server.shard.prefills[-1].requests[0].sampling.seed == 2**64 - 1


async def test_logprobs(server: Running) -> None:
    text = "h\u00e9llo"
    scripted(server.shard, say(server.router.service.text, text))
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    whole = await server.post("/v1/chat/completions", body)
    content = whole.json["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == text
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    stream = await server.post("/v1/chat/completions", {**body, "stream": True})
    parts = [c["logprobs"]["content"] for e in stream.events for c in e["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part] == content
    scripted(server.shard, say(server.router.service.text, "hello there"))
    columns = (await server.post("/v1/completions", {"prompt": "x", "logprobs": 1})).json["choices"][0]["logprobs"]
    assert "".join(columns["tokens"]) == "hello there"
    assert all(len(top) == 1 for top in columns["top_logprobs"])
    assert [("hello there" + "?")[o] for o in columns["text_offset"]] == [t[0] for t in columns["tokens"]]


@pytest.mark.parametrize("body", [
    {"n": 0}, {"n": 129}, {"n": "2"}, {"max_tokens": 0}, {"temperature": 2.5}, {"temperature": -1}, {"top_p": 0},
    {"top_p": 1e-60}, {"repetition_penalty": 1e7}, {"min_p": 1.5}, {"top_k": -2},
    {"stream_options": {"include_usage": True}}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21},
    {"logprobs": True, "top_logprobs": True}, {"logit_bias": {"400": 1}}, {"logit_bias": {"5": None}},
    {"stop": [""]}, {"stop": ["a"] * 5}, {"seed": 2**63}, {"tools": [{"type": "function"}]},
    {"response_format": {"type": "xml"}}, {"messages": []}, {"messages": [{"role": "user"}]},
])
async def test_chat_refusals(server: Running, body: dict[str, Any]) -> None:
    reply = await server.post("/v1/chat/completions", {**CHAT, **body})
    assert reply.status == 400
    error = reply.json["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] in {*body, "max_tokens"}
    assert error["param"] in error["message"]
    assert not server.shard.prefills


async def test_harmless_fields_of_chat(server: Running) -> None:
    body = {**CHAT, "max_tokens": 1, "stream_options": None, "response_format": {"type": "text"}, "tool_choice": "none"}
    assert (await server.post("/v1/chat/completions", body)).status == 200


async def test_context_length(server: Running) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 2000}]}
    for stream in (False, True):
        reply = await server.post("/v1/chat/completions", {**long, "stream": stream})
        assert reply.status == 400
        assert reply.json["error"]["code"] == "context_length_exceeded"
        assert "1023" in reply.json["error"]["message"]


@pytest.mark.parametrize("repeats", [1500, 300_000])
async def test_prompts_far_over_the_limit(server: Running, repeats: int) -> None:
    text = "a " * repeats
    native = await server.post("/generate", {"inputs": text, "parameters": {"max_new_tokens": 1}})
    assert native.status == 422
    chat = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 1})
    for message in (native.json["error"], chat.json["error"]["message"]):
        assert re.search(r"\b102[34]\b.*Given: (more than )?\d+", message)
    cut = await server.generate(text, 1, truncate=5)
    assert cut.headers["x-prompt-tokens"] == "5"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a"] * 5, [1, "a"], [400], [-1], [[5, 400]]])
async def test_prompt_refusals(server: Running, prompt: object) -> None:
    reply = await server.post("/v1/completions", {"prompt": prompt})
    assert (reply.status, reply.json["error"]["param"]) == (400, "prompt")


# --- tenants, permits, health, metrics ---


async def test_the_key_guards_every_post_route(start: Start) -> None:
    async with start(api_key="SeCrEt") as server:
        paths = [r.resource.canonical for r in server.router._runner.app.router.routes() if r.method == "POST" and r.resource]
        assert len(paths) == 15
        assert set(PUBLIC) == {"/v1/worker/register"}  # which has keys of its own, at gateways that have it
        for path in [*(path for path in paths if path not in PUBLIC), "/nope"]:
            reply = await server.post(path, {"inputs": "x"})
            assert reply.status == 401
            assert "error" in reply.json
        body = {"inputs": "x", "parameters": {"max_new_tokens": 1}}
        assert (await server.post("/generate", body, Authorization="bearer SeCrEt")).status == 200
        for path in ("/", "/health", "/ready", "/info", "/metrics", "/v1/models"):
            assert (await server.get(path)).status == 200


async def test_each_route_is_documented_and_each_documented_route_is_there(server: Running) -> None:
    router = server.router._runner.app.router
    routes = {(r.method, r.resource.canonical) for r in router.routes() if r.resource and r.method != "HEAD"}
    document = (await server.get("/openapi.json")).json
    assert routes == {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert (await server.get("/api-doc/openapi.json")).json == document
    page = await server.get("/docs")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"/v1/chat/completions" in page.raw


async def test_permits(start: Start) -> None:
    async with start(max_concurrent_requests=2) as server:
        streams = [await server.start_stream() for _ in range(2)]
        reply = await server.generate()
        assert (reply.status, reply.json) == (429, {"error": "Model is overloaded", "error_type": "overloaded"})
        reply = await server.post("/v1/chat/completions", CHAT)
        assert (reply.status, reply.json["error"]["type"]) == (429, "overloaded_error")
        assert (await server.get("/health")).status == 200
        for stream in streams:
            stream.close()
        await server.settled()
        reply = await server.post("/v1/completions", {"prompt": ["a", "b", "c"]})
        assert (reply.status, reply.json["error"]["param"]) == (400, "prompt")  # there will never be room for it
        stream = await server.start_stream()
        assert (await server.post("/v1/completions", {"prompt": ["a", "b"]})).status == 429
        stream.close()
        await server.settled()
        assert (await server.post("/v1/completions", {"prompt": ["a", "b"]})).status == 200
        await server.settled()


async def test_health_follows_the_shard(server: Running) -> None:
    assert (await server.get("/health")).raw == b""
    server.shard.healthy = False
    await server.health_is(503)
    reply = await server.get("/health")
    assert (reply.status, reply.json) == (503, {"error": "unhealthy", "error_type": "healthcheck"})
    assert (await server.get("/ready")).status == 503
    server.shard.healthy = True
    await server.health_is(200)


async def test_info_and_metrics(server: Running) -> None:
    info = (await server.get("/info")).json
    assert (info["model_id"], info["max_total_tokens"], info["max_batch_total_tokens"]) == ("scripted", 1024, 16000)
    assert len(info["tokenizer_hash"]) == 64
    assert info["features"] == ["prompt_logprobs", "grammar"]
    await server.generate(tokens=4)
    await server.generate(tokens=0)
    lines = set((await server.get("/metrics")).raw.decode().splitlines())
    assert {
        "tgi_request_count 2", "tgi_request_success 1", 'tgi_request_failure{err="validation"} 1',
        "tgi_request_generated_tokens_sum 4", "tgi_queue_size 0", "tgi_batch_current_size 0",
        'tgi_batch_inference_count{method="prefill"} 1', 'tgi_batch_decode_duration_count{method="prefill"} 1',
        "tgi_request_skipped_tokens_count 4", "tgi_request_skipped_tokens_sum 0",
    } <= lines


async def test_logs_hold_no_text_of_users(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await server.generate("zq7secret", 2)
    await server.generate("zq7secret", 0)
    await server.post("/v1/chat/completions", {"messages": [{"role": "zq7secret", "content": "x"}]})
    server.shard.fail(grpc.StatusCode.INTERNAL, "broken")
    assert "prompt tokens" in caplog.text
    assert "zq7secret" not in caplog.text


# --- batches ---


async def test_batch_mates_do_not_disturb_each_other(server: Running) -> None:
    alone = {text: (await server.generate(text, 30)).json["generated_text"] for text in "abcdefgh"}
    replies = await asyncio.gather(*(server.generate(text, 30) for text in alone))
    assert [r.json["generated_text"] for r in replies] == list(alone.values())


async def test_requests_join_a_running_batch(start: Start) -> None:
    shard = ScriptedShard(step_seconds=0.01)
    async with start(shard) as server:
        stream = await server.start_stream(tokens=200)
        assert (await server.generate(tokens=3)).json["details"]["generated_tokens"] == 3
        assert server.shard.prefills[-1].batch_id == server.shard.prefills[0].batch_id + 1 == 1
        stream.close()
        await server.settled()


async def test_a_long_prompt_joins_a_running_batch(start: Start) -> None:
    shard = ScriptedShard(max_total_tokens=100_000, chunk=1000)
    async with start(shard) as server:
        stream = await server.start_stream(tokens=5000)
        reply = await server.generate("x " * 20_000, 3)
        assert reply.json["details"]["generated_tokens"] == 3
        shard.room = 1
        waiting = asyncio.create_task(server.generate("x " * 20_000, 3))  # refused while the batch runs
        await asyncio.sleep(0.3)
        assert (await server.get("/health")).status == 200
        shard.room = 10
        assert (await waiting).json["details"]["generated_tokens"] == 3
        stream.close()
        await server.settled()


async def test_batch_size_limit(start: Start) -> None:
    async with start(max_batch_size=2) as server:
        replies = await asyncio.gather(*(server.generate(str(i), 10) for i in range(9)))
        assert all(r.json["details"]["generated_tokens"] == 10 for r in replies)
        assert server.shard.most_rows == 2


async def test_single_token_requests(server: Running) -> None:
    replies = await asyncio.gather(*(server.generate(str(i), 1 + 19 * (i % 2)) for i in range(16)))
    assert [r.json["details"]["generated_tokens"] for r in replies] == [1, 20] * 8


async def test_leaving_frees_the_place(server: Running) -> None:
    streams = [await server.start_stream(str(i)) for i in range(4)]
    step = server.shard.step
    streams[0].close()
    await until(lambda: server.shard.rows == 3)
    assert server.shard.step - step < 50
    for stream in streams[1:]:
        stream.close()
    await server.settled()
    await until(lambda: not server.shard.batches)
    assert 'tgi_request_failure{err="dropped"} 4' in (await server.get("/metrics")).raw.decode()


async def test_leaving_without_a_stream_or_while_queued(start: Start) -> None:
    async with start(max_batch_size=1) as server:
        stream = await server.start_stream()
        queued = [asyncio.create_task(server.generate(str(i), 900)) for i in range(3)]
        await until(lambda: server.router.batcher.waiting == 3)
        queued[0].cancel()
        await until(lambda: server.router.batcher.waiting == 2)
        assert server.router.batcher.running == 1
        stream.close()  # the next one runs now, and leaves as well
        await until(lambda: server.router.batcher.waiting == 1)
        for task in queued:
            task.cancel()
        await server.settled()


async def test_many_random_departures(server: Running) -> None:
    async def one(number: int) -> None:
        body = {"inputs": str(number), "parameters": {"max_new_tokens": 1 + number * 7 % 60}}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01 * (number % 9) + 0.005):
                await server.post("/generate_stream" if number % 2 else "/generate", body)

    await asyncio.gather(*(one(number) for number in range(100)))
    await server.settled()
    await until(lambda: not server.shard.batches)


async def test_preemption_goes_on_where_it_was(server: Running) -> None:
    expected = (await server.generate("a", 60)).json
    task = asyncio.create_task(server.generate("a", 60))
    other = asyncio.create_task(server.generate("b", 60))
    for _ in range(3):
        await asyncio.sleep(0.02)
        server.shard.preempt(1)
    assert (await task).json["details"]["tokens"] == expected["details"]["tokens"]
    assert (await other).json["details"]["generated_tokens"] == 60
    assert any(r.generated for p in server.shard.prefills for r in p.requests)


async def test_everything_is_preempted(server: Running) -> None:
    expected = (await server.generate("a", 40)).json
    task = asyncio.create_task(server.generate("a", 40))
    await asyncio.sleep(0.02)
    server.shard.preempt(5)
    assert (await task).json == expected


async def test_a_lost_batch_is_admitted_again_once(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=0.005)) as server:
        expected = (await server.generate("a", 60)).json
        task = asyncio.create_task(server.generate("a", 60))
        await asyncio.sleep(0.1)
        server.shard.lose()
        await asyncio.sleep(0.05)
        assert (await task).json == expected
        task = asyncio.create_task(server.generate("a", 900))
        for _ in range(2):
            await asyncio.sleep(0.1)
            server.shard.lose()
        reply = await task
        assert (reply.status, reply.json["error_type"]) == (424, "generation")
        await server.settled()


async def test_a_batch_is_lost_while_others_join_it(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=0.005)) as server:
        expected = (await server.generate("a", 60)).json
        task = asyncio.create_task(server.generate("a", 60))
        await asyncio.sleep(0.1)
        server.shard.lose()
        async with server.router.batcher.submit(GenerateRequest([40], 900)), asyncio.timeout(3):  # goes on for 4.5 s
            assert (await task).json == expected
        await server.settled()


async def test_what_a_failed_call_leaves_behind_is_freed(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=0.005)) as server:
        task = asyncio.create_task(server.generate("a", 900))
        await asyncio.sleep(0.1)
        server.shard.fail(grpc.StatusCode.INTERNAL, "a slip", forget=False)
        assert server.shard.rows == 1
        assert (await task).status == 424
        await server.settled()
        assert (await server.generate()).status == 200


async def test_a_closed_batcher_takes_nothing(start: Start) -> None:
    async with start() as server:
        await server.router.batcher.close("it is over")
        async with server.router.batcher.submit(GenerateRequest([40], 5)) as stream:
            with pytest.raises(GenerationFailed, match="it is over"):
                await stream.read()


async def test_a_failing_shard_gives_one_error_event(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=0.005)) as server:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 900}}
        native = asyncio.create_task(server.post("/generate_stream", body))
        openai = asyncio.create_task(server.post("/v1/chat/completions", {**CHAT, "stream": True}))
        await asyncio.sleep(0.1)
        server.shard.fail(grpc.StatusCode.INTERNAL, "cuda broke")
        events = (await native).events
        assert [e for e in events if "error" in e] == events[-1:]
        assert events[-1]["error_type"] == "generation"
        reply = await openai
        assert "error" in reply.events[-1]
        assert reply.done == 1
        await server.settled()
        assert (await server.generate()).status == 200


async def test_no_room_is_waited_for(start: Start) -> None:
    shard = ScriptedShard(step_seconds=0.002)
    async with start(shard) as server:
        shard.room = 2
        replies = await asyncio.gather(*(server.generate(str(i), 20) for i in range(7)))
        assert all(r.json["details"]["generated_tokens"] == 20 for r in replies)
        shard.room, shard.refusals = 0, 0
        task = asyncio.create_task(server.generate("a", 5))
        await asyncio.sleep(0.6)
        assert 1 <= shard.refusals <= 5
        shard.room = 5
        assert (await task).status == 200


async def test_only_the_guilty_request_fails(start: Start) -> None:
    shard = ScriptedShard()
    async with start(shard) as server:
        poison = server.router.service.text.tokenizer.encode("!")[0]
        shard.poison = poison
        inputs = ["a", "b", "!", "c", "d"]
        replies = await asyncio.gather(*(server.generate(text, 20) for text in inputs))
        assert [r.status for r in replies] == [200, 200, 422, 200, 200]
        assert replies[2].json["error"] == "Input validation error: a poisoned prompt"
        await server.settled()


async def test_a_scripted_step_is_the_same_row_by_row_and_in_columns(start: Start) -> None:
    texts = []
    for in_columns in (False, True):
        async with start(ScriptedShard(in_columns=in_columns)) as server:
            replies = await asyncio.gather(*(server.generate(str(n), 3 + 5 * n) for n in range(5)))
            texts.append([reply.json["generated_text"] for reply in replies])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 5


async def test_one_error_of_the_shard_ends_one_request(start: Start) -> None:
    class Failing(ScriptedShard):
        def _advance(self, batch: Any, row: Any, step: pb.Step) -> None:
            if row.generated == 3 and row.request.stopping.max_new_tokens == 7:
                step.details.add(
                    request_id=row.request.id, is_end=True, finish_reason=pb.Detail.ERROR, message="NaN logits"
                )
                del batch.rows[row.request.id]
            else:
                super()._advance(batch, row, step)

    async with start(Failing()) as server:
        bad, good = await asyncio.gather(server.generate("a", 7), server.generate("b", 20))
        assert bad.status == 424
        assert "NaN logits" in bad.json["error"]
        assert good.json["details"]["generated_tokens"] == 20
        await server.settled()


async def test_a_stopped_shard(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=0.005)) as server:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 900}}
        task = asyncio.create_task(server.post("/generate_stream", body))
        await asyncio.sleep(0.1)
        await server.shard.stop()
        events = (await task).events
        assert [e for e in events if "error" in e] == events[-1:]
        await server.health_is(503)
        assert (await server.generate()).status == 424


# --- silence and the end ---


@pytest.mark.parametrize(("path", "done"), [("/generate_stream", 0), ("/v1/chat/completions", 1)])
async def test_a_slip_within_a_stream_is_its_last_event(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, done: int
) -> None:
    def slip(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("headrace_router.service.Ticket.ended", slip)
    reply = await server.post(path, {**CHAT, "inputs": "x", "parameters": {"max_new_tokens": 3}, "stream": True})
    assert reply.status == 200
    assert [e for e in reply.events if "error" in e] == reply.events[-1:]
    assert "internal error" in str(reply.events[-1])
    assert reply.done == done


async def test_silence_is_filled_with_comments(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    shard = ScriptedShard()
    async with start(shard) as server:
        shard.room = 0
        body = {"inputs": "x", "parameters": {"max_new_tokens": 2}}
        native = asyncio.create_task(server.post("/generate_stream", body))
        openai = asyncio.create_task(server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True}))
        await asyncio.sleep(0.3)
        shard.room = 9
        for reply in (await native, await openai):
            assert reply.raw.count(b": ping\n") >= 3
            assert len(reply.events) == 2


async def test_headers_leave_before_the_first_token(start: Start) -> None:
    shard = ScriptedShard()
    async with start(shard) as server:
        shard.room = 0
        async with asyncio.timeout(1):
            response = await server.session.post(server.url + "/generate_stream", json={"inputs": "x"})
        assert response.status == 200
        response.close()
        await server.settled()


async def test_draining_refuses_the_new_and_lets_the_old_end(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=0.005)) as server:
        task = asyncio.create_task(server.generate(tokens=60))
        await asyncio.sleep(0.1)
        drain = asyncio.create_task(server.router.drain())
        await asyncio.sleep(0.02)
        assert (await server.get("/ready")).status == 503
        assert (await server.get("/health")).status == 200
        assert (await server.generate()).status == 503
        assert (await server.post("/v1/chat/completions", CHAT)).status == 503
        assert not drain.done()
        assert (await task).json["details"]["generated_tokens"] == 60
        await drain


async def test_the_drain_has_an_end(start: Start) -> None:
    async with start(ScriptedShard(step_seconds=0.01), graceful_termination_timeout=0.1) as server:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 900}}
        task = asyncio.create_task(server.post("/generate_stream", body))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(1):
            await server.router.drain()
        await server.router.batcher.close("the server is stopping")
        events = (await task).events
        assert "stopping" in events[-1]["error"]


async def test_slow_readers_cost_nobody_time(server: Running) -> None:
    lazy = await server.start_stream(tokens=1000)
    replies = await asyncio.gather(*(server.generate(str(i), 20) for i in range(4)))
    assert all(r.status == 200 for r in replies)
    rest = (await lazy.content.read()).decode()
    assert json.loads(rest.strip().splitlines()[-1][6:])["index"] == 1000


async def test_the_default_script_depends_on_the_prompt() -> None:
    requests = [pb.Request(token_ids=pb.TokenIds(ids=[i])) for i in (1, 2)]
    assert cycle(requests[0], 0) != cycle(requests[1], 0)


async def test_connection_reuse_after_a_stream(server: Running) -> None:
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(3):
            body = {"inputs": "x", "parameters": {"max_new_tokens": 2}}
            async with session.post(server.url + "/generate_stream", json=body) as response:
                assert (await response.read()).count(b"data: ") == 2
