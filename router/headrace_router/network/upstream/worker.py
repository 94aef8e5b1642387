"""A worker whose jobs another server runs: no shards and no model here, one agent between gateway and server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from urllib.parse import urlsplit

import aiohttp

from headrace._common.errors import StartupError
from headrace_router.network import joining
from headrace_router.network.agent import Agent
from headrace_router.network.control import Control
from headrace_router.network.frames import TEXT, Model
from headrace_router.network.lender import Lender
from headrace_router.network.upstream.detect import Found, detect
from headrace_router.network.upstream.engine import CONNECT_SECONDS, UpstreamEngine
from headrace_router.settings import LendingSettings, RouterSettings

log = logging.getLogger(__name__)


def describe(found: Found, settings: RouterSettings) -> Model:
    """What the gateway is told of a server.

    Raises:
        StartupError: it does not say how long its texts may be, and nobody else does.
    """
    total = min((n for n in (found.max_total, settings.max_total_tokens) if n is not None), default=0)
    if not total:
        raise StartupError("the upstream does not tell its longest prompt plus output: give it with --max-total-tokens")
    return Model(
        joining.told_name(settings.model_id or found.model), format=f"text from {found.kind}",
        tokenizer_hash=found.tokenizer_hash, max_input=found.max_input or total - 1, max_total=total,
        features=[TEXT, *sorted(found.api.features)],
    )


async def lend(settings: RouterSettings, upstream: LendingSettings, ready: Callable[[str], None]) -> None:
    """Work until SIGTERM or SIGINT; `ready` is told what is lent.

    Raises:
        StartupError: the upstream or the gateway is not to be used.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        nohup = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
        if not nohup:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    working = asyncio.create_task(work(settings, upstream, ready))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
    for task in (working, stopped):
        if not task.done():
            task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def work(settings: RouterSettings, upstream: LendingSettings, ready: Callable[[str], None]) -> None:
    """Work until it is cancelled; raises what `lend` raises."""
    url = (upstream.upstream or "").rstrip("/").removesuffix("/v1")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise StartupError(f"--upstream {upstream.upstream} must be a URL that begins with http:// or https://")
    token = joining.token(settings)
    key = upstream.upstream_api_key
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers={"Authorization": f"Bearer {key}"} if key else None,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
    ) as client:
        found = await detect(client, url, upstream.upstream_api, settings.model_id or None)
        model = describe(found, settings)
        engine = UpstreamEngine(client, url, found.api)
        lender = Lender(settings.slots or found.slots, settings.pause_above_load, available=lambda: engine.available)
        agent = Agent(settings.gateway or "", token, model, lender, engine.submit)
        control = Control(settings.worker_socket, str(os.getpid()), agent)
        await control.start()
        what = f"{model.id} at {url} ({found.kind}, {model.max_total} tokens, {lender.slots} slots)"
        ready(f"{what} is lent to {settings.gateway}")
        tasks = [asyncio.create_task(agent.run()), asyncio.create_task(engine.watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # they end only by failing
            for task in done:
                task.result()
        finally:
            await agent.leave()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await control.close()
