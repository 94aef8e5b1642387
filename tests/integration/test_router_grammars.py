"""How the APIs' ways to write a grammar reach the shard, or are refused before."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.routers import Running, running
from tests.fakes.scripted_shard import ScriptedShard
from tests.fakes.text_models import write_text_model

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
AS_SENT = ("json_schema", json.dumps(SCHEMA, separators=(",", ":")))
CHAT = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BAD = {"type": "object", "properties": {"a": {"uniqueItems": True}}}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    write_text_model(tmp_path)
    async with running(tmp_path) as made:
        yield made
        await made.settled()


def sent(server: Running) -> list[tuple[str, str] | None]:
    requests = [r for prefill in server.shard.prefills for r in prefill.requests]
    return [(r.grammar.type, r.grammar.value) if r.HasField("grammar") else None for r in requests]


@pytest.mark.parametrize(("given", "expected"), [
    ({"type": "json", "value": SCHEMA}, AS_SENT), ({"type": "json_object", "value": SCHEMA}, AS_SENT),
    ({"type": "json", "value": AS_SENT[1]}, AS_SENT),
    ({"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}, AS_SENT),
    ({"type": "regex", "value": "a|b"}, ("regex", "a|b")), ({"type": "json_object"}, ("json_object", "")), (None, None),
])
async def test_native(server: Running, given: Any, expected: tuple[str, str] | None) -> None:
    reply = await server.generate(tokens=1, grammar=given)
    assert reply.status == 200, reply.raw
    assert set(sent(server)) == {expected}


@pytest.mark.parametrize(("body", "expected"), [
    ({"response_format": {"type": "text"}}, None), ({"response_format": {"type": "json_object"}}, ("json_object", "")),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}, AS_SENT),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, AS_SENT),
    ({"response_format": {"type": "json", "value": SCHEMA}}, AS_SENT),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_SENT),
    ({"response_format": {"type": "regex", "value": "[0-9]"}}, ("regex", "[0-9]")),
    ({"guided_json": SCHEMA}, AS_SENT), ({"guided_json": AS_SENT[1]}, AS_SENT), ({"guided_regex": "a+"}, ("regex", "a+")),
    ({"guided_choice": ["yes", "n\"o"]}, ("choice", '["yes","n\\"o"]')),
    ({"guided_grammar": "root ::= \"a\""}, ("ebnf", "root ::= \"a\"")),
    ({"guided_grammar": "start: \"a\""}, ("lark", "start: \"a\"")),
    ({"structured_outputs": {"json": SCHEMA}}, AS_SENT), ({"structured_outputs": {"json_object": True}}, ("json_object", "")),
    ({"structured_outputs": {"choice": ["a"], "regex": None}}, ("choice", '["a"]')),
    ({"guided_json": None, "response_format": None, "structured_outputs": None}, None),
])
async def test_openai(server: Running, body: dict[str, Any], expected: tuple[str, str] | None) -> None:
    for path, rest in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x", "max_tokens": 1})):
        reply = await server.post(path, {**rest, **body})
        assert reply.status == 200, reply.raw
    assert set(sent(server)) == {expected}


@pytest.mark.parametrize(("grammar", "words"), [
    ({"type": "json", "value": BAD}, "uniqueItems"), ({"type": "json", "value": "not json"}, "JSON"),
    ({"type": "json", "value": 5}, "schema"), ({"type": "json"}, "schema"), ({"type": "xml", "value": ""}, "'xml'"),
    ({"type": "regex", "value": "("}, "unclosed group"), ({"type": "regex", "value": 5}, "string"), ("x", "type"), ({}, "type"),
    ({"type": "regex", "value": "a" * 200_000}, "131072"), ({"type": "json_schema", "value": SCHEMA}, "schema"),
])
async def test_native_refusals(server: Running, grammar: Any, words: str) -> None:
    for path in ("/generate", "/generate_stream"):
        reply = await server.post(path, {"inputs": "x", "parameters": {"grammar": grammar}})
        assert (reply.status, reply.json["error_type"]) == (422, "validation")
        assert reply.json["error"].startswith("Input validation error: `grammar")
        assert words in reply.json["error"]
    assert not server.shard.prefills


@pytest.mark.parametrize(("body", "words"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": BAD}}}, "uniqueItems"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"), ({"response_format": {}}, "type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": "not json"}}}, "JSON"),
    ({"response_format": {"type": "xml"}}, "'xml'"), ({"guided_regex": "a**"}, "quantifier"), ({"guided_choice": []}, "string"),
    ({"guided_grammar": "start: foo"}, "foo"), ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "exclude each other"),
])
async def test_openai_refusals(server: Running, body: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        reply = await server.post("/v1/chat/completions", {**CHAT, **body, "stream": stream})
        assert reply.status == 400
        error = reply.json["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"].partition(".")[0] in body
        assert words in error["message"]
    assert not server.shard.prefills


@pytest.mark.parametrize("depth", range(900, 1000, 9))
async def test_deep_schemas_are_refused_by_whoever_meets_their_depth(server: Running, depth: int) -> None:
    schema = '{"items":' * depth + "{}" + "}" * depth
    body = f'{{"inputs":"x","parameters":{{"grammar":{{"type":"json","value":{schema}}}}}}}'
    headers = {"Content-Type": "application/json"}
    async with server.session.post(f"{server.url}/generate", data=body, headers=headers) as reply:
        assert reply.status in (400, 422), await reply.text()


async def test_a_model_that_cannot_be_constrained(tmp_path: Path) -> None:
    write_text_model(tmp_path)
    shard = ScriptedShard()
    shard.features.remove("grammar")
    async with running(tmp_path, shard) as server:
        reply = await server.generate(grammar={"type": "regex", "value": "a"})
        assert reply.status == 422
        assert "`grammar` is not supported: this model's tokens cannot be constrained" in reply.json["error"]


async def test_an_operator_who_wants_no_grammars(tmp_path: Path) -> None:
    write_text_model(tmp_path)
    tool = {"type": "function", "function": {"name": "f"}}
    async with running(tmp_path, disable_grammar_support=True) as server:
        assert (await server.generate(tokens=1)).status == 200
        reply = await server.generate(tokens=1, grammar={"type": "regex", "value": "a"})
        assert (reply.status, "--disable-grammar-support" in reply.json["error"]) == (422, True)
        for more, field in (({"guided_regex": "a"}, "guided_regex"), ({"tools": [tool], "tool_choice": "required"}, "tools")):
            reply = await server.post("/v1/chat/completions", {**CHAT, **more})
            assert (reply.status, reply.json["error"]["param"]) == (400, field)
        assert (await server.post("/v1/chat/completions", {**CHAT, "tools": [tool]})).status == 200
