"""Readers of a gateway's streams, which note when they hear what."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

TERMINAL = {"done", "failed", "cancelled", "expired"}
PATIENCE = aiohttp.ClientTimeout(total=240)


@dataclass
class Heard:
    """What one reader has heard of one request, in order; `times` are time.monotonic()."""

    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def hear(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.times.append(time.monotonic())

    @property
    def tokens(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == "token"]

    @property
    def ids(self) -> list[int]:
        return [token["id"] for token in self.tokens]

    @property
    def is_under_way(self) -> bool:
        """It has some tokens; or it was a short one."""
        return len(self.tokens) > 10 or any(event["kind"] in TERMINAL for event in self.events)

    @property
    def text(self) -> str:
        """As its last event tells it."""
        return str(self.events[-1]["text"])

    @property
    def logged(self) -> list[dict[str, Any]]:
        """What is in the request's log: a position in the queue is not."""
        return [event for event in self.events if event["kind"] != "queued"]

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        times = [at for event, at in zip(self.events, self.times, strict=True) if event["kind"] == "token"]
        return [after - before for before, after in pairwise(times)]

    def check(self) -> None:
        """It has ended well, once, and has each token once."""
        kinds = [event["kind"] for event in self.events]
        assert kinds[-1] == "done", self.events[-1]
        assert sum(kind in TERMINAL for kind in kinds) == 1
        assert [token["index"] for token in self.tokens] == list(range(len(self.tokens)))
        if not any(token["special"] for token in self.tokens):  # TGI's streams show those by name
            assert "".join(token["text"] for token in self.tokens) == self.text


class Client:
    """Talks to a gateway."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self._session = url, session

    async def ask(self, inputs: str, tokens: int, **parameters: Any) -> str:
        """Hand a request in; returns its id."""
        reply = await self.post("/v1/requests", inputs, tokens, **parameters)
        assert reply[0] == 202, reply
        return str(json.loads(reply[1])["id"])

    async def post(self, path: str, inputs: str, tokens: int, **parameters: Any) -> tuple[int, bytes, Any]:
        """(status, body, headers)"""
        body = {"inputs": inputs, "parameters": {"max_new_tokens": tokens, **parameters}}
        async with self._session.post(self.url + path, json=body) as response:
            return response.status, await response.read(), response.headers.copy()

    async def delete(self, job: str) -> int:
        async with self._session.delete(f"{self.url}/v1/requests/{job}") as response:
            return response.status

    async def state(self, job: str) -> dict[str, Any]:
        async with self._session.get(f"{self.url}/v1/requests/{job}") as response:
            state: dict[str, Any] = await response.json()
        return state

    async def events(self, job: str, after: str | None = None) -> AsyncIterator[dict[str, Any]]:
        """The events of a request, named by `kind` and with their `event_id`."""
        headers = {"Last-Event-ID": after} if after is not None else {}
        async with self._session.get(f"{self.url}/v1/requests/{job}/events", headers=headers) as response:
            assert response.status == 200, response.status
            fields: dict[str, str] = {}
            async for line in response.content:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                fields[name] = value
                if name == "" and "data" in fields:
                    yield {**json.loads(fields["data"]), "kind": fields["event"], "event_id": fields.get("id")}
                    fields = {}

    async def follow(self, job: str, heard: Heard | None = None) -> Heard:
        """A request's events from the first to the last."""
        heard = Heard() if heard is None else heard
        async for event in self.events(job):
            heard.hear(event)
        return heard

    async def stream(self, inputs: str, tokens: int, heard: Heard, **parameters: Any) -> Heard:
        """The same from the ordinary route /generate_stream."""
        body = {"inputs": inputs, "parameters": {"max_new_tokens": tokens, "details": True, **parameters}}
        async with self._session.post(f"{self.url}/generate_stream", json=body) as response:
            assert response.status == 200, response.status
            async for line in response.content:
                if line.startswith(b"data:"):
                    event = json.loads(line[5:])
                    assert "token" in event, event
                    heard.hear({"kind": "token", "index": len(heard.events), **event["token"]})
                    if event["generated_text"] is not None:
                        heard.hear({"kind": "done", "text": event["generated_text"]})
        return heard

    async def ask_all(
        self, count: int, tokens: int, meanwhile: Callable[[list[Heard]], Awaitable[None]] | None = None
    ) -> list[Heard]:
        """So many requests at once: every second one is drawn from a seed, every fifth is an ordinary stream; and what
        happens meanwhile.
        """
        heard = [Heard() for _ in range(count)]
        running = [asyncio.create_task(self._one(number, tokens, heard[number])) for number in range(count)]
        if meanwhile is not None:
            await meanwhile(heard)
        return await asyncio.gather(*running)

    async def _one(self, number: int, tokens: int, heard: Heard) -> Heard:
        inputs, parameters = question(number), {"seed": number, "do_sample": bool(number % 2)}
        if number % 5 == 2:
            return await self.stream(inputs, tokens, heard, **parameters)
        return await self.follow(await self.ask(inputs, tokens, **parameters), heard)


def question(number: int) -> str:
    """One that is answered at length."""
    return f"Chapter {number}. The mill stood by the river, and every morning the miller"


async def until(true: Callable[[], bool], seconds: float = 60.0) -> float:
    """Seconds until it is true."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - begun


def recoveries(streams: list[Heard], losses: list[float]) -> list[list[float]]:
    """For each loss of a worker: seconds from it to the next token of each stream that went on elsewhere after it."""
    found: list[list[float]] = [[] for _ in losses]
    for heard in streams:
        resumed = 0.0
        for event, at in zip(heard.events, heard.times, strict=True):
            if event["kind"] == "resumed":
                resumed = at
            elif event["kind"] == "token" and resumed:
                number = max(number for number, loss in enumerate(losses) if loss <= resumed)
                found[number].append(at - losses[number])
                resumed = 0.0
    return found
