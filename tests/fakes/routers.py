"""A router in this process in front of a scripted shard, and a client that reads its streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from multidict import CIMultiDict

from headrace_router.router import Router
from headrace_router.settings import RouterSettings
from tests.fakes.scripted_shard import ScriptedShard


@dataclass
class Reply:
    """An HTTP answer."""

    status: int
    headers: CIMultiDict[str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        """The JSON of every SSE frame but [DONE]."""
        frames = [line[6:] for line in self.raw.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(frame) for frame in frames if frame != "[DONE]"]

    @property
    def done(self) -> int:
        return self.raw.count(b"data: [DONE]")


async def until(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it does not.
    """
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)


@dataclass
class Running:
    """Router, shard, client."""

    url: str
    router: Router
    shard: ScriptedShard
    session: aiohttp.ClientSession
    open: list[aiohttp.ClientResponse] = field(default_factory=list)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return Reply(response.status, response.headers.copy(), await response.read())

    async def get(self, path: str) -> Reply:
        async with self.session.get(self.url + path) as response:
            return Reply(response.status, response.headers.copy(), await response.read())

    async def generate(self, inputs: str = "hello", tokens: int = 5, **parameters: Any) -> Reply:
        body = {"inputs": inputs, "parameters": {"max_new_tokens": tokens, "details": True, **parameters}}
        return await self.post("/generate", body)

    async def start_stream(self, inputs: str = "hello", tokens: int = 500) -> aiohttp.ClientResponse:
        """Start a native stream and read its first event."""
        body = {"inputs": inputs, "parameters": {"max_new_tokens": tokens}}
        response = await self.session.post(self.url + "/generate_stream", json=body)
        assert response.status == 200
        assert (await response.content.readline()).startswith(b"data: ")
        return response

    async def settled(self, seconds: float = 2.0) -> None:
        """Wait until nothing runs, waits or holds a permit, here and in the shard.

        Raises:
            TimeoutError: it does not come to that.
        """
        await until(lambda: self.state() == (0, 0, 0, 0), seconds)

    async def health_is(self, status: int, seconds: float = 5.0) -> None:
        """Wait until GET /health answers so.

        Raises:
            TimeoutError: it does not.
        """
        async with asyncio.timeout(seconds):
            while (await self.get("/health")).status != status:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def state(self) -> tuple[int, int, int, int]:
        """(permits taken, waiting, running, running in the shard)"""
        router = self.router
        return router.service.active, router.batcher.waiting, router.batcher.running, self.shard.rows


@contextlib.asynccontextmanager
async def running(folder: Path, shard: ScriptedShard | None = None, **settings: Any) -> AsyncIterator[Running]:
    """Start shard and router, stop both at the end."""
    shard = shard or ScriptedShard()
    target = f"unix:{folder}/shard-0"
    await shard.start(target)
    given = {"model_folder": str(folder), "model_id": "scripted", "shard_target": target, "port": 0, **settings}
    router = Router(RouterSettings(**given))
    url = await router.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Running(url, router, shard, session)
    finally:
        await router.stop()
        await shard.stop()
