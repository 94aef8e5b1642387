"""The worker's end of the connection against a scripted gateway: what ends it, what it comes back after, and how fast."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from headrace._common.errors import StartupError
from headrace_router.network.agent import PAUSES, Agent
from headrace_router.network.frames import PATH, PROTOCOLS, Model
from headrace_router.network.lender import Lender
from tests.fakes.routers import until


class ScriptedGateway:
    """Closes each connection with the next of some codes, at once after the hello; the last one stays open."""

    def __init__(self, *closes: tuple[int, bytes]) -> None:
        self._closes = list(closes)
        self.url = ""
        self.hellos: list[bytes] = []

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=PROTOCOLS)
        await socket.prepare(request)
        self.hellos.append((await socket.receive()).data)
        if self._closes:
            code, reason = self._closes.pop(0)
            await socket.close(code=code, message=reason)
        else:
            await socket.receive()
        return socket


@contextlib.asynccontextmanager
async def gateway(*closes: tuple[int, bytes]) -> AsyncIterator[ScriptedGateway]:
    made = ScriptedGateway(*closes)
    app = web.Application()
    app.router.add_get(PATH, made.connect)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"ws://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


def agent(url: str, pauses: list[float]) -> Agent:
    def rest(most: float) -> float:
        pauses.append(most)
        return 0.0

    def source(frame: object) -> object:
        raise AssertionError("no job was sent")

    return Agent(url, "wk_token", Model("m", max_total=8), Lender(1), source, rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [4401, 4403, 4409])
async def test_a_worker_that_is_not_wanted_ends_and_says_why(code: int) -> None:
    async with gateway((code, b"the token was revoked")) as scripted:
        with pytest.raises(StartupError, match=rf"\({code}\): the token was revoked"):
            await asyncio.wait_for(agent(scripted.url, []).run(), 3)


async def test_a_worker_comes_back_ever_more_slowly(caplog: pytest.LogCaptureFixture) -> None:
    """After a close, a gateway that is down, or one that answers something else; at most half a minute apart."""
    pauses: list[float] = []
    async with gateway(*[(1001, b"the server is stopping")] * 2, *[(4408, b"you do not read")] * 8) as scripted:
        worker = agent(scripted.url, pauses)
        running = asyncio.create_task(worker.run())
        await until(lambda: len(scripted.hellos) == 11)
        await worker.leave()
        running.cancel()
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, *[PAUSES[1]] * 5]
    assert "the gateway closed the connection (1001): the server is stopping" in caplog.text
    assert "the gateway closed the connection (4408): you do not read" in caplog.text
    running = asyncio.create_task(agent(scripted.url, pauses).run())
    await until(lambda: len(pauses) >= 15)
    running.cancel()
    assert "the gateway cannot be reached" in caplog.text


def test_pauses_are_drawn_from_all_of_their_length() -> None:
    worker = Agent("ws://x", "wk_token", Model("m"), Lender(1), lambda frame: None)  # type: ignore[arg-type, return-value]
    drawn = [worker._rest(30.0) for _ in range(200)]
    assert 0 <= min(drawn) < 5
    assert 25 < max(drawn) <= 30
