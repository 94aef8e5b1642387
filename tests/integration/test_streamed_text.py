"""Over HTTP: the deltas of a stream add up to the text of the same request without one, on every route."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.v1 import generation_pb2 as pb
from tests.fakes import tokenizers
from tests.fakes.routers import Running, running
from tests.fakes.scripted_shard import ScriptedShard
from tests.fakes.text_models import write_text_model

CASES = 25
STOPS = ("END", "\u200d", "\U0001f600", "\u0301", "sky", "the\n", "D\n\n", "\ufffd", ". ")


class Drawn:
    """A script of random tokens; the same for the same number in the prompt."""

    def __init__(self, vocab_size: int) -> None:
        self.seed, self._size = 0, vocab_size

    def __call__(self, request: pb.Request, index: int) -> int:
        drawn = random.Random(self.seed * 1000 + index)
        if drawn.random() < 0.6:  # a piece rather than a single byte
            return drawn.randrange(257, self._size)
        return drawn.randrange(2, self._size)


@pytest.fixture(params=["byte_level", "byte_fallback"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Running]:
    made = getattr(tokenizers, request.param)()
    write_text_model(tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    shard = ScriptedShard(
        script=Drawn(made.get_vocab_size()), vocab_size=made.get_vocab_size(), eos_id=1, step_seconds=0.0005, tokens_per_step=3
    )
    async with running(tmp_path, shard) as server:
        yield server
        await server.settled()


def body(path: str, stops: list[str], tokens: int) -> dict[str, Any]:
    if path == "/generate":
        return {"inputs": "a", "parameters": {"max_new_tokens": tokens, "stop": stops}}
    asked = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    return {**asked, "max_tokens": tokens, "stop": stops, "temperature": 0}


def delta(event: dict[str, Any]) -> str:
    if "token" in event:
        return "" if event["token"]["special"] else str(event["token"]["text"])
    (choice,) = event["choices"]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


def whole(answer: dict[str, Any]) -> str:
    if "generated_text" in answer:
        return str(answer["generated_text"])
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_deltas_add_up_to_the_text(server: Running, path: str) -> None:
    drawn = random.Random(7)
    script = server.shard.script
    assert isinstance(script, Drawn)
    stopped = 0
    for seed in range(CASES):
        script.seed = seed
        asked = body(path, drawn.sample(STOPS, drawn.randrange(4)), drawn.randrange(1, 40))
        answer = (await server.post(path, asked)).json
        streaming = ("/generate_stream", asked) if path == "/generate" else (path, {**asked, "stream": True})
        events = (await server.post(*streaming)).events
        assert "".join(map(delta, events)) == whole(answer)
        if path == "/generate":
            assert events[-1]["generated_text"] == whole(answer)
            assert [e["index"] for e in events] == list(range(1, len(events) + 1))
            stopped += len(events) < asked["parameters"]["max_new_tokens"]
    assert path != "/generate" or 0 < stopped < CASES
