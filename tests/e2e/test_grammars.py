"""Constrained output of the embedded model, through every API."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import jsonschema
import pytest

from tests.processes import Service

PERSON: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "kind", "tags"], "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "dog"]}, "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "maxItems": 2},
    },
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
CHAT = {"model": "x", "messages": [{"role": "user", "content": "Describe somebody."}], "max_tokens": 200}


@pytest.fixture(scope="module")
def running(service: Callable[..., Service]) -> Service:
    return service("--max-input-tokens", "512", "--max-total-tokens", "1024", "--max-concurrent-requests", "256")


@pytest.fixture
async def http(running: Service) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(running.url) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    async with http.post(path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def test_chat_gives_what_the_schema_asks_for(http: aiohttp.ClientSession) -> None:
    bodies = [{**CHAT, "response_format": FORMAT, "seed": n, "temperature": t} for n, t in enumerate((0, 0.7, 1.0, 1.5))]
    for reply in await asyncio.gather(*(post(http, "/v1/chat/completions", body) for body in bodies)):
        choice = reply["choices"][0]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


async def test_a_stream_says_the_same(http: aiohttp.ClientSession) -> None:
    body = {**CHAT, "response_format": FORMAT, "temperature": 0}
    whole = (await post(http, "/v1/chat/completions", body))["choices"][0]["message"]["content"]
    async with http.post("/v1/chat/completions", json={**body, "stream": True}) as reply:
        lines = (await reply.text()).splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == whole
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_free_text_beside_it_stays_as_it_is(http: aiohttp.ClientSession) -> None:
    free = {"inputs": "The sky is", "parameters": {"max_new_tokens": 24}}
    bound = {"type": "regex", "value": "(yes|no)(,(yes|no)){3}"}
    alone = await post(http, "/generate", free)
    asked = {"inputs": "Pick:", "parameters": {"max_new_tokens": 12, "do_sample": True, "grammar": bound}}
    beside, *picked = await asyncio.gather(post(http, "/generate", free), *(post(http, "/generate", asked) for _ in range(3)))
    assert beside == alone
    assert all(re.fullmatch(bound["value"], p["generated_text"]) for p in picked)


async def test_a_cut_value_says_so(http: aiohttp.ClientSession) -> None:
    reply = await post(http, "/v1/chat/completions", {**CHAT, "max_tokens": 5, "temperature": 0, "response_format": FORMAT})
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["message"]["content"].startswith("{")


async def test_guided_completions(http: aiohttp.ClientSession) -> None:
    async def text(**fields: Any) -> str:
        reply = await post(http, "/v1/completions", {"prompt": "Answer:", "max_tokens": 40, "seed": 1, **fields})
        made: str = reply["choices"][0]["text"]
        return made

    assert await text(guided_choice=["blue", "green"]) in ("blue", "green")
    assert re.fullmatch(r"a[bc]{3}", await text(guided_grammar="root ::= \"a\" x x x\nx ::= [bc]\n"))
    assert json.loads(await text(structured_outputs={"json": {"const": {"a": [1, 2]}}})) == {"a": [1, 2]}
