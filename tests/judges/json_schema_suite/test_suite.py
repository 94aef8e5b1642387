"""The JSON Schema Test Suite against a random model: what is accepted comes out valid, what is refused is refused by name."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from tests.judges.json_schema_suite.parts import schemas
from tests.processes import Service

SEEDS = 4
TOKENS = 300
AT_ONCE = 24


@pytest.mark.judges
async def test_the_suite(service: Callable[..., Service], tiny_model: Path) -> None:
    url = service("--model-id", str(tiny_model), "--max-batch-total-tokens", "16384").url
    places = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(url) as http:
        outcomes = [o for o in await asyncio.gather(*(judge(http, places, *case) for case in schemas())) if o]
    found = Counter(outcome for outcome, _ in outcomes)
    print(dict(found))
    assert [place for outcome, place in outcomes if outcome in ("invalid", "failed", "unnamed")] == []
    assert found["valid"] > 50
    assert found["refused"] > 10


async def judge(http: aiohttp.ClientSession, places: asyncio.Semaphore, name: str, schema: Any) -> tuple[str, str]:
    """(outcome of all answers to one schema, where)."""
    outcomes = [await answer(http, places, schema, seed) for seed in range(SEEDS)]
    for outcome, text in outcomes:
        if outcome in ("invalid", "failed", "unnamed"):
            return outcome, f"{name}: {text}"
    kinds = {outcome for outcome, _ in outcomes}
    assert "refused" not in kinds or kinds == {"refused"}
    return "valid" if "valid" in kinds else kinds.pop(), name


async def answer(http: aiohttp.ClientSession, places: asyncio.Semaphore, schema: Any, seed: int) -> tuple[str, str]:
    parameters = {
        "max_new_tokens": TOKENS, "do_sample": True, "temperature": 3.0, "seed": seed, "details": True,
        "grammar": {"type": "json", "value": schema},
    }
    async with places, http.post("/generate", json={"inputs": "x", "parameters": parameters}) as reply:
        body = await reply.json()
    if reply.status == 422:
        return "refused" if is_named(schema, body["error"]) else "unnamed", body["error"]
    if reply.status != 200:
        return "failed", str(body)
    text = body["generated_text"]
    if body["details"]["finish_reason"] != "eos_token":
        return "cut", text
    try:
        jsonschema.Draft4Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return "invalid", f"{text!r}: {error}"
    return "valid", text


def is_named(schema: Any, error: str) -> bool:
    """Whether a refusal names a keyword (also one of a meta-schema that the schema refers to), or something of the schema."""
    if "Unimplemented keys: [" in error:
        return True
    if isinstance(schema, dict):
        return any(key in error or is_named(value, error) for key, value in schema.items())
    if isinstance(schema, list):
        return any(is_named(item, error) for item in schema)
    return isinstance(schema, str) and schema in error
