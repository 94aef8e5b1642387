"""The APIs' parameters through a whole router, before a scripted shard: choices, prompts in answers, one form of all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.v1 import generation_pb2 as pb
from headrace_router.canonical import canonical
from headrace_router.streams import TokenStream
from headrace_router.types import GenerateRequest
from tests.fakes.routers import Reply, Running, running, until
from tests.fakes.text_models import EOS_ID, write_text_model

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    write_text_model(tmp_path)
    async with running(tmp_path, max_best_of=4) as made:
        yield made
        await made.settled()


def sent(server: Running) -> list[pb.Request]:
    """All requests that the shard has had."""
    return [request for prefill in server.shard.prefills for request in prefill.requests]


def by_seed(request: pb.Request, index: int) -> int:
    """A script: every seed says something else."""
    return 40 + (request.sampling.seed * 5 + index) % 50


def encode(server: Running, text: str) -> list[int]:
    return server.router.service.text.tokenizer.encode(text, add_special_tokens=False)


def say(server: Running, text: str) -> None:
    ids = [*encode(server, text), EOS_ID]
    server.shard.script = lambda request, index: ids[index] if index < len(ids) else EOS_ID


def choice_text(reply: Reply, index: int) -> str:
    choices = [c for event in reply.events for c in event["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


# --- several choices ---


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_choices_differ_in_their_seeds(server: Running, path: str) -> None:
    server.shard.script = by_seed
    body: dict[str, Any] = {"max_tokens": 4, "seed": 2**63 - 1, "n": 3, **(CHAT if "chat" in path else {"prompt": "hello"})}
    whole = await server.post(path, body)
    assert [r.sampling.seed for r in sent(server)] == [2**63 - 1, 2**63, 2**63 + 1]
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in whole.json["choices"]]
    assert len(set(texts)) == 3
    assert [c["index"] for c in whole.json["choices"]] == [0, 1, 2]
    one = await server.post(path, {**body, "n": 1})
    usage = whole.json["usage"]
    assert usage["prompt_tokens"] == one.json["usage"]["prompt_tokens"] == int(whole.headers["x-prompt-tokens"])
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    stream = await server.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert [choice_text(stream, index) for index in range(3)] == texts
    assert stream.events[-1]["usage"] == usage
    assert all(event["usage"] is None for event in stream.events[:-1])
    roles = [c["index"] for e in stream.events for c in e["choices"] if "role" in c.get("delta", {})]
    assert sorted(roles) == ([0, 1, 2] if "chat" in path else [])
    assert stream.done == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_tells_of_guessed_tokens(server: Running, path: str) -> None:
    body = {"max_tokens": 4, "n": 2, **(CHAT if "chat" in path else {"prompt": "hello"})}
    assert "completion_tokens_details" not in (await server.post(path, body)).json["usage"]
    server.shard.guesses = 5, 3
    details = (await server.post(path, body)).json["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 4}


async def test_prompts_without_a_seed_draw_one_each(server: Running) -> None:
    await server.post("/v1/completions", {"prompt": ["hello", "hello"], "max_tokens": 1})
    assert len({request.sampling.seed for request in sent(server)}) == 2


async def test_leaving_cancels_all_choices(server: Running) -> None:
    body = {"prompt": "hello", "max_tokens": 900, "n": 3, "stream": True}
    response = await server.session.post(server.url + "/v1/completions", json=body)
    await response.content.readline()
    await until(lambda: server.shard.rows == 3)
    assert server.router.service.active == 3
    response.close()
    await server.settled()


async def test_the_best_choices_are_shown(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.shard.script = by_seed
    put = TokenStream.put

    def likelier_by_seed(stream: TokenStream, token: Any) -> None:
        token.logprob = -1.0 / token.id  # a larger id counts as likelier
        put(stream, token)

    monkeypatch.setattr(TokenStream, "put", likelier_by_seed)
    body = {"prompt": "hello", "max_tokens": 1, "n": 2, "best_of": 4, "seed": 1}
    reply = await server.post("/v1/completions", body)
    tokenizer = server.router.service.text.tokenizer
    assert [c["text"] for c in reply.json["choices"]] == [tokenizer.decode([40 + s * 5]) for s in (4, 3)]
    assert reply.json["usage"]["completion_tokens"] == 4
    native = await server.generate("hello", 1, best_of=3, do_sample=True)
    details = native.json["details"]
    losers = details["best_of_sequences"]
    assert len(losers) == 2
    assert max(s["tokens"][0]["id"] for s in losers) <= details["tokens"][0]["id"]
    assert set(losers[0]) == {"generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"}
    assert len({details["seed"], *(s["seed"] for s in losers)}) == 3


@pytest.mark.parametrize(("body", "param"), [
    ({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 5}, "best_of"), ({"best_of": 2, "stream": True}, "best_of"),
    ({"n": 129}, "n"), ({"n": 128, "prompt": ["a", "b"]}, "n"), ({"suffix": "x"}, "suffix"), ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 6}, "logprobs"), ({"min_tokens": 17}, "min_tokens"), ({"min_tokens": -1}, "min_tokens"),
    ({"stop_token_ids": [400]}, "stop_token_ids"), ({"guided_regex": "a("}, "guided_regex"),
    ({"use_beam_search": True}, "use_beam_search"), ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"typical_p": 1.5}, "typical_p"), ({"response_format": {"type": "xml"}}, "response_format"),
    ({"service_tier": "best"}, "service_tier"),
])
async def test_refusals_name_the_parameter(server: Running, body: dict[str, Any], param: str) -> None:
    reply = await server.post("/v1/completions", {"prompt": "hello", **body})
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert param in reply.json["error"]["message"]
    assert not sent(server)


# --- prompts in answers ---


@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo(server: Running, as_ids: bool) -> None:
    text = "the sky\u00e9 is"
    ids = server.router.service.text.tokenizer.encode(text)
    say(server, " blue")
    body = {"prompt": ids if as_ids else text, "echo": True, "logprobs": 2, "max_tokens": 20}
    whole = await server.post("/v1/completions", body)
    choice = whole.json["choices"][0]
    assert choice["text"] == text + " blue"
    columns = choice["logprobs"]
    tokens = len(ids) + len(encode(server, " blue"))
    assert {len(column) for column in columns.values()} == {tokens}
    assert columns["token_logprobs"][: len(ids)] == [None, *(-1.0 for _ in ids[1:])]
    assert columns["top_logprobs"][0] is None
    assert all(len(top) == 3 for top in columns["top_logprobs"][1 : len(ids)])  # two, and the token itself
    shown = zip(columns["tokens"], columns["text_offset"], strict=True)
    assert all(choice["text"].startswith(t, at) for t, at in shown if not t.startswith("bytes:"))
    stream = await server.post("/v1/completions", {**body, "stream": True})
    assert choice_text(stream, 0) == choice["text"]
    parts = [c["logprobs"] for e in stream.events for c in e["choices"] if c["logprobs"]]
    assert {name: [x for part in parts for x in part[name]] for name in columns} == columns
    plain = await server.post("/v1/completions", {**body, "logprobs": None})
    assert (plain.json["choices"][0]["text"], plain.json["choices"][0]["logprobs"]) == (choice["text"], None)


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_a_prompt_without_output(server: Running, stream: bool) -> None:
    body = {"prompt": ["hello", "one two"], "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    reply = await server.post("/v1/completions", body)
    choices = [c for e in reply.events for c in e["choices"]] if stream else reply.json["choices"]
    choices.sort(key=lambda choice: choice["index"])
    assert [c["text"] for c in choices] == ["hello", "one two"]
    assert [c["finish_reason"] for c in choices] == ["length", "length"]
    assert ["".join(c["logprobs"]["tokens"]) for c in choices] == ["hello", "one two"]
    usage = reply.events[-1]["usage"] if stream else reply.json["usage"]
    assert usage["completion_tokens"] == 0


async def test_token_ids_on_request(server: Running) -> None:
    say(server, "hello there")
    ids = [*encode(server, "hello there"), EOS_ID]
    chat = await server.post("/v1/chat/completions", {**CHAT, "return_token_ids": True})
    assert chat.json["choices"][0]["token_ids"] == ids
    assert chat.json["prompt_token_ids"] == encode(server, RENDERED)
    stream = await server.post("/v1/chat/completions", {**CHAT, "return_token_ids": True, "stream": True})
    assert [i for e in stream.events for c in e["choices"] for i in c.get("token_ids", [])] == ids
    assert [e["prompt_token_ids"] for e in stream.events if "prompt_token_ids" in e] == [encode(server, RENDERED)]
    body = {"prompt": "one", "return_token_ids": True}
    raw = (await server.post("/v1/completions", body)).json["choices"][0]
    assert (raw["token_ids"], raw["prompt_token_ids"]) == (ids, encode(server, "one"))
    events = (await server.post("/v1/completions", {**body, "stream": True})).events
    assert [i for e in events for c in e["choices"] for i in c.get("token_ids", [])] == ids
    assert "token_ids" not in (await server.post("/v1/completions", {"prompt": "one"})).json["choices"][0]


# --- stopping ---


async def test_stop_tokens_and_what_is_kept_of_a_stop(server: Running) -> None:
    say(server, "hello there one")
    *_, last = ids = encode(server, "hello there one")
    body = {"prompt": "x", "stop_token_ids": [last, last], "max_tokens": 50}
    cut = (await server.post("/v1/completions", body)).json
    assert list(sent(server)[-1].stopping.stop_token_ids) == [last]
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("stop", len(ids))
    kept = (await server.post("/v1/completions", {**body, "include_stop_str_in_output": True})).json["choices"][0]
    assert kept["text"] == "hello there one"
    assert kept["text"].startswith(cut["choices"][0]["text"])
    assert cut["choices"][0]["text"] != kept["text"]
    by_text = {"prompt": "x", "stop": " there", "max_tokens": 50}
    texts = [
        (await server.post("/v1/completions", {**by_text, "include_stop_str_in_output": keep})).json["choices"][0]["text"]
        for keep in (False, True)
    ]
    assert texts == ["hello", "hello there"]


async def test_minimum_and_no_end(server: Running) -> None:
    say(server, "hello hello one")
    at = len(encode(server, "hello"))
    body = {"prompt": "x", "stop": "hello", "min_tokens": at, "ignore_eos": True, "max_tokens": 50}
    reply = (await server.post("/v1/completions", body)).json
    assert reply["choices"][0]["text"] == "hello "
    stopping = sent(server)[-1].stopping
    assert (stopping.min_new_tokens, stopping.ignore_eos) == (at, True)


async def test_tiers_and_priorities_are_workload_classes(server: Running) -> None:
    chat = {**CHAT, "max_tokens": 1}
    cases: list[tuple[dict[str, Any], int, str | None]] = [
        ({}, 2, None), ({"service_tier": "auto"}, 2, "default"), ({"service_tier": "flex"}, 0, "flex"),
        ({"priority": 3}, 0, None), ({"priority": -1}, 2, None), ({"priority": 0}, 2, None),
    ]
    for body, priority, tier in cases:
        reply = await server.post("/v1/chat/completions", {**chat, **body})
        assert sent(server)[-1].priority == priority
        assert reply.json.get("service_tier") == tier


# --- chat ---


@pytest.mark.parametrize(("last", "body", "end"), [
    ("user", {}, "<|im_start|>assistant\n"), ("user", {"add_generation_prompt": False}, "x<|im_end|>\n"),
    ("assistant", {}, "assistant\nx"), ("assistant", {"continue_final_message": True}, "assistant\nx"),
    ("assistant", {"continue_final_message": False}, "x<|im_end|>\n<|im_start|>assistant\n"),
    ("assistant", {"add_generation_prompt": True}, "x<|im_end|>\n<|im_start|>assistant\n"),
])
async def test_how_a_conversation_ends(server: Running, last: str, body: dict[str, Any], end: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": last, "content": "x"}]
    reply = await server.post("/chat_tokenize", {"messages": messages, **body})
    assert reply.json["templated_text"].endswith(end)
    chat = await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **body})
    assert chat.json["usage"]["prompt_tokens"] == len(reply.json["tokenize_response"])


@pytest.mark.parametrize(("body", "param"), [
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"), ({"documents": [{"text": "a"}]}, "documents"),
    ({"chat_template": "x"}, "chat_template"), ({"modalities": ["text", "audio"]}, "modalities"),
    ({"web_search_options": {"a": 1}}, "web_search_options"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
])
async def test_chat_refusals_name_the_parameter(server: Running, body: dict[str, Any], param: str) -> None:
    reply = await server.post("/v1/chat/completions", {**CHAT, **body})
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not sent(server)


async def test_template_variables_reach_the_template_as_plain_text(tmp_path: Path) -> None:
    write_text_model(tmp_path, "{{ messages[0].content }}|{{ mood }}|{{ reasoning_effort }}")
    async with running(tmp_path) as server:
        body = {**CHAT, "chat_template_kwargs": {"mood": "<|im_end|>"}, "reasoning_effort": "low"}
        reply = await server.post("/chat_tokenize", body)
        assert reply.json["templated_text"] == "hi|<|im_end|>|low"
        assert EOS_ID not in [token["id"] for token in reply.json["tokenize_response"]]


# --- the native API ---


async def test_several_inputs(server: Running) -> None:
    texts = ["hello", "one two"]
    body = {"inputs": texts, "parameters": {"max_new_tokens": 3, "return_full_text": False}}
    several = (await server.post("/", body)).json
    alone = [(await server.post("/generate", {**body, "inputs": text})).json for text in texts]
    assert several == alone
    for inputs, stream in (([], False), (["a"] * 5, False), (texts, True)):
        assert (await server.post("/", {"inputs": inputs, "stream": stream})).status == 422


async def test_watermark_reaches_the_shard(server: Running) -> None:
    await server.generate(tokens=1, watermark=True)
    await server.generate(tokens=1)
    assert [request.sampling.watermark for request in sent(server)] == [True, False]


async def test_invocations_go_by_the_shape(server: Running) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/": {"inputs": "hello", "parameters": {"max_new_tokens": 3}},
        "/v1/chat/completions": {**CHAT, "max_tokens": 3, "temperature": 0},
        "/v1/completions": {"prompt": "hello", "max_tokens": 3, "temperature": 0},
    }
    for path, body in bodies.items():
        direct, clouded = (await server.post(path, body)).json, (await server.post("/invocations", body)).json
        assert clouded == direct if path == "/" else clouded["choices"] == direct["choices"]
    assert (await server.post("/invocations", {"text": "x"})).json["error_type"] == "validation"
    stream = await server.post("/invocations", {**bodies["/v1/chat/completions"], "stream": True})
    assert stream.done == 1


async def test_vertex(server: Running) -> None:
    instances = [{"inputs": "hello", "parameters": {"max_new_tokens": 3, "seed": 5}}, {**CHAT, "max_tokens": 2, "n": 3}]
    reply = await server.post("/vertex", {"instances": instances})
    assert [len(text) for text in reply.json["predictions"]] == [3, 2]
    assert all(request.sampling.do_sample for request in sent(server))
    assert (await server.post("/vertex", {"instances": []})).status == 422


async def test_tokenize_and_detokenize(server: Running) -> None:
    text = "hello \u00e9"
    ids = server.router.service.text.tokenizer.encode(text)
    native = await server.post("/tokenize", {"inputs": text})
    assert [token["id"] for token in native.json] == ids
    other = await server.post("/tokenize", {"model": "x", "prompt": text, "return_token_strs": True})
    assert (other.json["tokens"], other.json["count"], other.json["max_model_len"]) == (ids, len(ids), 1024)
    assert len(other.json["token_strs"]) == len(ids)
    chat = await server.post("/tokenize", CHAT)
    assert chat.json["tokens"] == encode(server, RENDERED)
    back = await server.post("/detokenize", {"model": "x", "tokens": chat.json["tokens"]})
    assert back.json == {"prompt": RENDERED}
    for path, body in (("/tokenize", {}), ("/tokenize", {"inputs": "a", "prompt": "a"}), ("/detokenize", {"tokens": [400]})):
        assert (await server.post(path, body)).status == 422


async def test_models(server: Running) -> None:
    listed = (await server.get("/v1/models")).json["data"][0]
    assert (await server.get("/v1/models/scripted")).json == listed
    reply = await server.get("/v1/models/other/model")
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")


# --- one form ---


async def _captured(server: Running, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> GenerateRequest:
    seen: list[GenerateRequest] = []
    engine = server.router.service.engine
    submit = engine.submit

    def spy(request: GenerateRequest) -> TokenStream:
        seen.append(request)
        return submit(request)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "submit", spy)
        assert (await server.post(path, body)).status == 200
    return seen[0]


@pytest.mark.parametrize(("native", "openai"), [
    ({}, {"temperature": 0}), ({}, {"temperature": 0, "top_p": 1, "presence_penalty": 0, "logit_bias": {}, "seed": 3}),
    ({"do_sample": True, "seed": 5}, {"seed": 5}),
    ({"temperature": 0.7, "top_p": 0.9, "top_k": 40, "typical_p": 0.8, "seed": 5, "repetition_penalty": 1.0},
     {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "typical_p": 0.8, "seed": 5, "min_p": 0.0}),
    ({"do_sample": True, "temperature": 1.0, "top_k": 400, "seed": 2**64 - 1}, {"temperature": 1, "top_k": -1, "seed": -1}),
    ({"frequency_penalty": 0.3, "repetition_penalty": 1.1},
     {"temperature": 0, "frequency_penalty": 0.3, "repetition_penalty": 1.1}),
    ({"stop": ["b", "a", "b"]}, {"temperature": 0, "stop": ["a", "b"], "include_stop_str_in_output": True}),
])
async def test_the_same_request_over_three_apis(
    server: Running, native: dict[str, Any], openai: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"inputs": RENDERED, "parameters": {"max_new_tokens": 3, **native}}),
        ("/v1/completions", {"prompt": RENDERED, "max_tokens": 3, **openai}),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 3, **openai}),
    ]
    made = [canonical(await _captured(server, path, body, monkeypatch)) for path, body in bodies]
    assert made[0] == made[1] == made[2]


async def test_normalized_text_is_the_same_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text_model(tmp_path)
    async with running(tmp_path, normalize="nfc") as server:
        made = []
        for text in ("caf\u00e9\nx", " cafe\u0301\r\nx\n"):
            chat = {"messages": [{"role": "user", "content": text}]}
            for path, body in (
                ("/generate", {"inputs": text, "parameters": {"max_new_tokens": 1}}),
                ("/v1/completions", {"prompt": text, "max_tokens": 1, "temperature": 0}),
                ("/v1/chat/completions", {**chat, "max_tokens": 1, "temperature": 0}),
            ):
                made.append(canonical(await _captured(server, path, body, monkeypatch)))
        assert made[:3] == made[3:]
        assert made[0] == made[1] != made[2]
