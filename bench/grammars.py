"""What constrained output costs: the masks of a batch beside its forward passes, a schema that was seen before, and what a
grammar that is slow to compile does to the stream of somebody else.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp

from bench.figures import Figure, Result
from headrace._common.grammars import Grammar
from headrace.v1 import generation_pb2 as pb
from headrace_launcher.bench.stats import median
from headrace_router.grammars import GrammarChecker
from tests.processes import Service

BATCH = 32
STEPS = 48
ROUNDS = 7
SCHEMA: dict[str, Any] = {
    "type": "array", "minItems": 1000, "items": {
        "type": "object", "additionalProperties": False, "required": ["name", "kind", "price", "tags", "sold"], "properties": {
            "name": {"type": "string", "maxLength": 40}, "kind": {"enum": ["book", "film", "song"]},
            "price": {"type": "number", "minimum": 0}, "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "sold": {"type": "boolean"},
        },
    },
}
SLOW: tuple[dict[str, Any], ...] = (  # the second part of a pattern differs from call to call: none was seen before
    {"type": "regex", "value": "(a{{1000}}){{1000}}b{n}"}, {"type": "regex", "value": "(.{{1,100}}){{1,100}}x{n}"},
    {"type": "regex", "value": "((a|b)*a(a|b){{20}})c{n}"},
)


def measure() -> Result:
    """Run all three."""
    result = Result("grammars", setup={"batch": BATCH, "steps": STEPS, "rounds": ROUNDS})
    service = Service("--max-total-tokens", "1024")
    try:
        service.wait_ready()
        stub = service.stub()
        free, bound = [], []
        for number in range(ROUNDS + 1):  # the first one warms up
            pair = (step_ms(stub, None), step_ms(stub, pb.Grammar(type="json_schema", value=json.dumps(SCHEMA))))
            if number:
                free.append(pair[0])
                bound.append(pair[1])
        calm, disturbed = asyncio.run(gaps(service.url))
    finally:
        service.stop()
    ratios = [b / f for f, b in zip(free, bound, strict=True)]
    result.figures = [
        Figure("step of 32 free rows", "ms", median(free), samples=tuple(free)),
        Figure("step of 32 rows with a JSON schema", "ms", median(bound), samples=tuple(bound)),
        Figure("the same, side by side", "ratio", median(ratios), below=1.05, samples=tuple(ratios)),
        Figure("a schema seen before", "ms", asyncio.run(seen_ms()), below=1.0),
        Figure("longest gap of a stream alone", "ms", calm),
        Figure("longest gap while slow grammars come in", "ms", disturbed),
        Figure("added by them", "ms", disturbed - calm, below=50.0),
    ]
    return result


def step_ms(stub: Any, grammar: pb.Grammar | None) -> float:
    """Milliseconds in which each of the rows gets a token, over some steps."""
    requests = [
        pb.Request(
            id=i + 1, text=f"A list of {i} things in JSON:", grammar=grammar, sampling=pb.Sampling(temperature=1.0, seed=i),
            stopping=pb.Stopping(max_new_tokens=STEPS + 8, ignore_eos=True),
        )
        for i in range(BATCH)
    ]
    *_, first = stub.Prefill(pb.PrefillRequest(owner="bench", requests=requests))
    begin, tokens = 0.0, 0
    for step in stub.Decode(pb.DecodeRequest(batch_ids=[first.batch_id], owner="bench", max_steps=STEPS)):
        if begin:
            tokens += len(step.intermediates.request_id)
        begin = begin or time.perf_counter()
    seconds = time.perf_counter() - begin
    stub.Clear(pb.ClearRequest(owner="bench"))
    return seconds * 1e3 * BATCH / tokens


async def seen_ms() -> float:
    """Milliseconds that the router spends on a schema that it has checked before."""
    checker = GrammarChecker()
    source = json.dumps(SCHEMA)
    await checker.check(Grammar("json_schema", source))
    begin = time.perf_counter()
    for _ in range(100):
        await checker.check(Grammar("json_schema", str(source)))
    checker.close()
    return (time.perf_counter() - begin) * 10


async def gaps(url: str) -> tuple[float, float]:
    """Longest time between two tokens of a stream (ms): alone, and while slow grammars come in."""
    async with aiohttp.ClientSession() as session:
        await longest_gap(session, url)
        calm = median([await longest_gap(session, url) for _ in range(3)])
        others = [asyncio.create_task(ask(session, url, form, n)) for n in range(1, 4) for form in SLOW]
        disturbed = await longest_gap(session, url)
        await asyncio.gather(*others)
    return calm, disturbed


async def longest_gap(session: aiohttp.ClientSession, url: str) -> float:
    """Of one stream, in milliseconds, without the wait for the first token."""
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 200}}
    longest, last = 0.0, 0.0
    async with session.post(f"{url}/generate_stream", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data:"):
                now = time.perf_counter()
                longest, last = max(longest, now - last if last else 0.0), now
    return longest * 1e3


async def ask(session: aiohttp.ClientSession, url: str, form: dict[str, Any], number: int) -> None:
    grammar = {"type": form["type"], "value": form["value"].format(n=f"{{{number}}}")}
    body = {"inputs": "x", "parameters": {"max_new_tokens": 8, "grammar": grammar}}
    async with session.post(f"{url}/generate", json=body) as response:
        await response.read()
