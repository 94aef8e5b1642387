"""Scripted servers that answer as llama.cpp, vLLM and TGI do, byte for byte as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from headrace_router.network.upstream.worker import work
from headrace_router.settings import LendingSettings, RouterSettings
from tests.fakes.network import Net
from tests.fakes.routers import until

FACTS: dict[str, dict[str, Any]] = {
    "llama.cpp": {
        "/v1/models": {"object": "list", "data": [{"id": "/models/scripted", "object": "model", "owned_by": "llamacpp"}]},
        "/props": {"default_generation_settings": {"n_ctx": 512, "params": {}}, "total_slots": 2, "model_path": "scripted"},
    },
    "vllm": {
        "/v1/models": {"object": "list", "data": [
            {"id": "org/scripted", "object": "model", "owned_by": "vllm", "max_model_len": 1024, "root": "org/scripted"},
        ]},
    },
    "tgi": {
        "/info": {"model_id": "org/scripted", "max_total_tokens": 1024, "max_input_tokens": 1000, "version": "3.3.5"},
    },
}
ROUTES = {"llama.cpp": "/v1/completions", "vllm": "/v1/completions", "tgi": "/generate_stream"}


class Upstream:
    """A server whose streams are the chunks in `chunks`; without a last one (`hold`), they stay open."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.chunks: list[bytes] = []
        self.status, self.hold, self.loading = 200, False, False
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.gone = 0  # streams whose reader left before their end
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.loading:
            error = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
            return web.json_response(error, status=503)
        if request.method == "GET":
            fact = {"/health": {"status": "ok"}, **FACTS[self.kind]}.get(request.path)
            return web.json_response(fact) if fact is not None else web.Response(status=404, text="no such route")
        self.bodies.append(await request.json())
        self.headers.append(request.headers.copy())
        if self.status != 200:
            return web.json_response({"error": {"message": "context is full"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for chunk in self.chunks:
                await response.write(chunk)
                await asyncio.sleep(0)
            if self.hold:
                await asyncio.sleep(60)
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise
        return response


def data(**event: Any) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n\n"


def choice(text: str, finish: str | None = None, **more: Any) -> bytes:
    """A chunk of a completion."""
    return data(id="cmpl-1", object="text_completion", choices=[{"index": 0, "text": text, "finish_reason": finish, **more}])


def token(number: int, text: str, details: dict[str, Any] | None = None, special: bool = False) -> bytes:
    """An event of TGI, which writes no blank after `data:`."""
    told = {"id": number, "text": text, "logprob": -0.25, "special": special}
    body = {"index": 1, "token": told, "generated_text": "" if details else None, "details": details}
    return b"data:" + json.dumps(body).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def lent(net: Net, upstream: Upstream, **settings: Any) -> AsyncIterator[asyncio.Task[None]]:
    """A worker that lends the server to the gateway; stopped at the end."""
    own = RouterSettings(
        gateway=net.url.replace("http", "ws"), worker_token_file=str(net.token_file),
        worker_socket=str(net.folder / f"{upstream.port}.sock"), **settings,
    )
    before = len(net.gateway.sessions)
    task = asyncio.create_task(work(own, LendingSettings(upstream=upstream.url), lambda text: None))
    try:
        await until(lambda: task.done() or len(net.gateway.sessions) > before, 5.0)
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
