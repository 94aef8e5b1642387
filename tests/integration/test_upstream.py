"""Workers that lend a running server: its API found out, its streams read, its faults kept to the job that they are about."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace._common.errors import StartupError
from tests.fakes.network import Net, network
from tests.fakes.routers import until
from tests.fakes.upstreams import Upstream, choice, data, lent, token

BODY: dict[str, Any] = {"inputs": "hello", "parameters": {"max_new_tokens": 20, "details": True}}
EOS = {"finish_reason": "eos_token", "generated_tokens": 3, "seed": None}
LENGTH = {**EOS, "finish_reason": "length"}
DONE = b"data: [DONE]\n\n"


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Net]:
    async with network(tmp_path, disconnect_grace=0.0) as made:
        yield made
        await until(lambda: made.gateway.running + made.gateway.waiting == 0)


@contextlib.asynccontextmanager
async def upstream(kind: str) -> AsyncIterator[Upstream]:
    made = Upstream(kind)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def generate(net: Net, **parameters: Any) -> Any:
    reply = await net.post("/generate", {**BODY, "parameters": {**BODY["parameters"], **parameters}})
    assert reply.status == 200, reply.raw
    return reply.json


async def test_llama_cpp(net: Net) -> None:
    """Empty chunks, its own log probabilities with ids, `stop` at the end token, comments, bytes cut anywhere."""
    async with upstream("llama.cpp") as server, lent(net, server):
        session = next(iter(net.gateway.sessions.values()))
        assert (session.slots, session.model.max_total, session.model.format) == (2, 512, "text from llama.cpp")
        told = {"content": [{"id": 70, "token": "né", "bytes": [], "logprob": -0.5, "top_logprobs": []}]}
        part = {"content": [{"id": 71, "token": "\ufffd", "bytes": [150], "logprob": -0.5, "top_logprobs": []}]}
        whole = b"".join([
            choice(""), choice("né", logprobs=told), b": ping\n\n", choice(" the  sky"),
            choice("世", logprobs=part), choice("", "stop"), DONE,
        ])
        server.chunks = [bytes([byte]) for byte in whole]
        made = await generate(net, temperature=0.5, top_k=3, seed=2**40 + 5, repetition_penalty=1.1)
        assert made["generated_text"] == "né the  sky世"
        assert made["details"]["finish_reason"] == "eos_token"
        tokens = made["details"]["tokens"]
        assert (tokens[0]["id"], tokens[0]["text"], tokens[0]["logprob"]) == (70, "né", -0.5)
        assert "".join(t["text"] for t in tokens) == "né the  sky世<|im_end|>"
        assert 71 not in [t["id"] for t in tokens]
        assert {k: server.bodies[0][k] for k in ("model", "prompt", "max_tokens", "temperature", "top_k", "seed")} == {
            "model": "/models/scripted", "prompt": "hello", "max_tokens": 20, "temperature": 0.5, "top_k": 3, "seed": 5,
        }
        assert server.bodies[0]["repeat_penalty"] == pytest.approx(1.1)
        assert (server.bodies[0]["min_p"], server.bodies[0]["top_p"]) == (0, 1)  # not its own defaults
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        await generate(net, grammar={"type": "json", "value": schema})
        assert server.bodies[1]["json_schema"] == schema


async def test_vllm(net: Net) -> None:
    """Chunks of several tokens, with ids and with the log probabilities of OpenAI's form; usage without choices."""
    async with upstream("vllm") as server, lent(net, server):
        logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.75], "top_logprobs": None, "text_offset": [0, 1]}
        server.chunks = [
            choice("ab", logprobs=logprobs, token_ids=[68, 69], prompt_token_ids=[1]), choice(" the", token_ids=[300]),
            choice("", "length", token_ids=[2], stop_reason=None), data(choices=[], usage={"prompt_tokens": 1}), DONE,
        ]
        made = (await generate(net))["details"]
        assert [(t["id"], t["text"]) for t in made["tokens"]] == [(68, "a"), (69, "b"), (300, " the"), (2, "<|im_end|>")]
        assert [t["logprob"] for t in made["tokens"][:2]] == [-0.5, -0.75]
        assert made["finish_reason"] == "length"
        assert server.bodies[0]["temperature"] == 0
        assert server.headers[0]["X-Request-Id"]


async def test_tgi(net: Net) -> None:
    async with upstream("tgi") as server, lent(net, server):
        server.chunks = [token(300, " the"), token(68, "a"), token(2, "<|im_end|>", EOS, special=True)]
        made = await generate(net, typical_p=0.5, top_n_tokens=2)
        assert made["generated_text"] == " thea"
        assert [t["id"] for t in made["details"]["tokens"]] == [300, 68, 2]
        assert made["details"]["tokens"][0]["logprob"] == -0.25
        sent = server.bodies[0]
        assert (sent["inputs"], sent["parameters"]["typical_p"], sent["parameters"]["top_n_tokens"]) == ("hello", 0.5, 2)


async def test_stop_strings_are_the_gateways_and_end_the_connection(net: Net) -> None:
    async with upstream("vllm") as server, lent(net, server):
        server.chunks, server.hold = [choice(" one tw"), choice("o three four")], True
        body = {"model": "x", "prompt": "hi", "max_tokens": 9, "stop": ["two"]}
        made = (await net.post("/v1/completions", body)).json["choices"][0]
        assert (made["text"], made["finish_reason"]) == (" one ", "stop")
        await until(lambda: server.gone == 1)
        whole = await generate(net, stop=["wo"])
        assert (whole["generated_text"], whole["details"]["finish_reason"]) == (" one two", "stop_sequence")
        await until(lambda: server.gone == 2)


async def test_a_client_that_goes_ends_the_connection(net: Net) -> None:
    async with upstream("llama.cpp") as server, lent(net, server):
        server.chunks, server.hold = [choice("a")], True
        response = await net.session.post(net.url + "/generate_stream", json=BODY)
        await response.content.readline()
        response.close()
        await until(lambda: server.gone == 1)


@pytest.mark.parametrize(("kind", "chunk"), [
    ("llama.cpp", b'error: {"code": 500, "message": "slot is lost", "type": "server_error"}\n\n'),
    ("vllm", data(error={"message": "slot is lost", "type": "InternalServerError", "code": 500})),
    ("tgi", data(error="slot is lost", error_type="generation")),
    ("vllm", b"data: {\n\n"), ("tgi", data(choices=[])), ("llama.cpp", choice("x", "abort")), ("vllm", b""),
    ("vllm", choice("x", token_ids=["a"])), ("tgi", token(68, "x" * 5000)), ("vllm", b"data: [1]\n\n"),
    ("tgi", b"data:" + b"x" * 2**21),
])
async def test_an_error_is_one_jobs(net: Net, kind: str, chunk: bytes) -> None:
    """It is told where there is no other worker, and the connection to the gateway stays."""
    async with upstream(kind) as server, lent(net, server) as worker:
        server.chunks = [token(68, "a") if kind == "tgi" else choice("a"), chunk]
        name = (await net.ask()).json["id"]
        events = await net.events(name)
        kinds = [event["kind"] for event in events if event["kind"] != "queued"]
        assert kinds == ["started", "token", *["reset", "token"] * 3, "failed"]
        assert events[-1]["code"] == "attempts_exhausted"
        assert not worker.done()
        end = token(68, "b", EOS) if kind == "tgi" else choice("b", "stop")
        server.chunks = [end]
        assert (await generate(net))["generated_text"] == "b"


async def test_text_is_text_and_no_more_than_was_asked_for(net: Net) -> None:
    async with upstream("vllm") as server, lent(net, server):
        server.chunks, server.hold = [choice("a\ud83d")] * 3, True
        server.chunks = [chunk.replace("\ud83d".encode("utf-8", "surrogatepass"), b"\\ud83d") for chunk in server.chunks]
        made = await generate(net, max_new_tokens=2)
        assert (made["generated_text"], made["details"]["finish_reason"]) == ("a?a?", "length")
        await until(lambda: server.gone == 1, 4.0)


async def test_a_lost_server_is_left_alone_until_it_answers(net: Net) -> None:
    async with upstream("vllm") as server, lent(net, server):
        server.chunks = [choice("fine", "stop")]
        assert (await generate(net))["generated_text"] == "fine"
        await server.stop()
        session = next(iter(net.gateway.sessions.values()))
        asking = asyncio.create_task(generate(net))
        await until(lambda: session.offered == 0, 4.0)
        await server.start()
        assert (await asking)["generated_text"] == "fine"


async def test_a_lost_text_worker_is_followed_from_the_beginning(net: Net) -> None:
    """Readers of events see a reset; a stream goes on where the text is the same, and ends with an error where it is not."""
    async with upstream("vllm") as first, upstream("tgi") as second:
        first.chunks, first.hold = [choice(" one"), choice(" tw")], True
        second.chunks = [token(300, " on"), token(301, "e two"), token(302, " three", LENGTH)]
        async with lent(net, first):
            name = (await net.ask()).json["id"]
            stream = asyncio.create_task(net.post("/generate_stream", BODY))
            other = asyncio.create_task(net.post("/generate_stream", BODY))
            session = next(iter(net.gateway.sessions.values()))
            await until(lambda: session.tokens >= 6 and len(first.bodies) == 3)
        async with lent(net, second):
            events = await net.events(name)
            kinds = [event["kind"] for event in events if event["kind"] != "queued"]
            assert kinds == ["started", *["token"] * (len(kinds) - 6), "reset", "token", "token", "token", "done"]
            assert [event["index"] for event in events[-4:-1]] == [0, 1, 2]
            assert events[-1]["text"] == " one two three"
            for reply in await asyncio.gather(stream, other):
                assert "".join(event["token"]["text"] for event in reply.events) == " one two three"
        async with lent(net, first):
            stream = asyncio.create_task(net.post("/generate_stream", BODY))
            await until(lambda: len(first.bodies) == 4 and next(iter(net.gateway.sessions.values())).tokens >= 2)
        second.chunks = [token(300, " else", LENGTH)]
        async with lent(net, second):
            assert "differs from what was sent already" in (await stream).events[-1]["error"]


async def test_what_an_api_does_not_carry_is_refused(tmp_path: Path) -> None:
    settings = {"disconnect_grace": 0.0, "no_worker_wait": 0.1}
    async with upstream("llama.cpp") as server, network(tmp_path, **settings) as net, lent(net, server):
        for parameters in ({"top_n_tokens": 2}, {"watermark": True}, {"grammar": {"type": "regex", "value": "a+"}}):
            reply = await net.post("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 4, **parameters}})
            assert (reply.status, server.bodies) == (503, [])
            assert next(iter(parameters)) in reply.json["error"]
        long = await net.post("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 600}})
        assert (long.status, "601 tokens" in long.json["error"]) == (503, True)


async def test_a_server_that_is_loading_is_waited_for_and_a_strange_one_is_refused(net: Net) -> None:
    async with upstream("llama.cpp") as server:
        server.loading = True
        asyncio.get_running_loop().call_later(0.5, setattr, server, "loading", False)
        async with lent(net, server) as worker:
            assert not worker.done()
    async with upstream("vllm") as server, lent(net, server, model_id="another") as worker:
        with pytest.raises(StartupError, match="the model is scripted here, another there"):
            await asyncio.wait_for(worker, 3)


async def test_the_owner_pauses_and_resumes(net: Net) -> None:
    async with upstream("vllm") as server, lent(net, server):
        path = net.folder / f"{server.port}.sock"
        assert path.stat().st_mode & 0o777 == 0o600

        async def tell(what: str) -> Any:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(json.dumps({"do": what}).encode() + b"\n")
            answer = json.loads(await reader.readline())
            writer.close()
            return answer

        server.chunks, server.hold = [choice("a")], True
        running = asyncio.create_task(net.post("/generate_stream", BODY))
        await until(lambda: len(server.bodies) == 1)
        session = next(iter(net.gateway.sessions.values()))
        state = await tell("pause")
        assert (state["running"], state["resting"], state["connected"], state["slots"]) == (1, "paused", True, 32)
        await until(lambda: session.offered == 0)
        waiting = (await net.ask()).json["id"]
        server.hold, server.chunks = False, [choice("b", "stop")]
        assert (await net.get(f"/v1/requests/{waiting}")).json["state"] == "queued"
        assert session.outputs
        assert (await tell("resume"))["resting"] is None
        assert (await net.events(waiting))[-1]["text"] == "b"
        assert "error" in await tell("nonsense")
        running.cancel()
