"""A gateway in this process, workers with scripted shards behind it, and a scripted worker that may misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from headrace_router.network.frames import PATH
from headrace_router.router import Router
from headrace_router.settings import RouterSettings
from tests.fakes.routers import Reply, until
from tests.fakes.scripted_shard import ScriptedShard
from tests.fakes.text_models import EOS_ID, write_text_model

FEATURES = ["grammar", "top_n", "prompt_logprobs", "resume"]
JSON = "headrace.worker.v1+json"


class ScriptedWorker:
    """Speaks the protocol as JSON, and sends what a test tells it to send."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.frames: list[dict[str, Any]] = []
        self.sent: dict[tuple[str, int], int] = {}  # by job and attempt

    async def send(self, **frame: Any) -> None:
        await self.socket.send_json(frame)

    async def next(self, kind: str, seconds: float = 3.0) -> dict[str, Any]:
        """The next frame of a kind; others are passed over."""
        async with asyncio.timeout(seconds):
            while True:
                message = await self.socket.receive()
                assert message.type is aiohttp.WSMsgType.TEXT, f"closed with {self.socket.close_code}"
                frame: dict[str, Any] = json.loads(message.data)
                self.frames.append(frame)
                if frame["t"] == kind:
                    return frame

    async def step(self, job: dict[str, Any], ids: list[int], index: int | None = None) -> None:
        key = job["job"], job["attempt"]
        at = index if index is not None else self.sent.get(key, job["rng_offset"])
        await self.send(t="step", x=[[*key, at + k, i, -0.5, 0, []] for k, i in enumerate(ids)])
        self.sent[key] = at + len(ids)

    def cut(self) -> None:
        """Cut the line without a word."""
        self.socket._writer.transport.abort()  # aiohttp has no public way to the socket of a client's WebSocket

    async def done(self, job: dict[str, Any], finish: str = "eos") -> None:
        await self.send(t="done", job=job["job"], attempt=job["attempt"], finish=finish)

    async def closed(self) -> int | None:
        """Read to the end; the close code."""
        async with asyncio.timeout(3):
            async for message in self.socket:
                self.frames.append(json.loads(message.data))
        return self.socket.close_code


class Net:
    """A gateway and those who talk to it."""

    def __init__(self, folder: Path, router: Router, url: str, session: aiohttp.ClientSession, token_file: Path) -> None:
        self.folder, self.router, self.url, self.session, self.token_file = folder, router, url, session, token_file
        self.workers: list[tuple[Router, ScriptedShard]] = []

    @property
    def gateway(self) -> Any:
        return self.router.batcher

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()

    async def get(self, path: str, **headers: str) -> Reply:
        async with self.session.get(self.url + path, headers=headers) as response:
            return Reply(response.status, response.headers.copy(), await response.read())

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return Reply(response.status, response.headers.copy(), await response.read())

    async def delete(self, path: str) -> int:
        async with self.session.delete(self.url + path) as response:
            return response.status

    async def ask(self, inputs: str = "hello", tokens: int = 8, **parameters: Any) -> Reply:
        return await self.post("/v1/requests", {"inputs": inputs, "parameters": {"max_new_tokens": tokens, **parameters}})

    async def events(self, job: str, **headers: str) -> list[dict[str, Any]]:
        """All events of a request, named and with their ids."""
        async with asyncio.timeout(10):
            reply = await self.get(f"/v1/requests/{job}/events", **headers)
        made = []
        for block in reply.raw.decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(":"))
            if "data" in fields:
                made.append({**json.loads(fields["data"]), "kind": fields["event"], "event_id": fields.get("id")})
        return made

    async def scripted(self, slots: int = 1, token: str | None = None, protocol: str = JSON, **model: Any) -> ScriptedWorker:
        """Connect a scripted worker and say hello."""
        served = {
            "id": "scripted", "tokenizer_hash": self.router.service.tokenizer_hash, "format": "f32", "max_total": 1024,
            "features": FEATURES, **model,
        }
        headers = {"Authorization": f"Bearer {self.token if token is None else token}"}
        socket = await self.session.ws_connect(self.url + PATH, headers=headers, protocols=[protocol], autoping=True)
        worker = ScriptedWorker(socket)
        await worker.send(t="hello", agent="test", models=[served], slots=slots)
        return worker

    async def worker(self, **shard: Any) -> tuple[Router, ScriptedShard]:
        """Start a whole router with a scripted shard that works for the gateway."""
        number = len(self.workers)
        scripted = ScriptedShard(**shard)
        scripted.features = ["top_n_tokens", "prompt_logprobs", "watermark", "resume", "grammar"]
        target = f"unix:{self.folder}/worker-{number}"
        await scripted.start(target)
        router = Router(RouterSettings(
            model_folder=str(self.folder), model_id="scripted", shard_target=target, port=0,
            gateway=self.url.replace("http", "ws"), worker_token_file=str(self.token_file),
        ))
        before = len(self.gateway.sessions)
        await router.start()
        self.workers.append((router, scripted))
        await until(lambda: len(self.gateway.sessions) > before)
        return router, scripted


@contextlib.asynccontextmanager
async def network(folder: Path, **settings: Any) -> AsyncIterator[Net]:
    """Start a gateway; stop it and all workers at the end."""
    write_text_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 400, "eos_token_id": EOS_ID}))
    token_file = folder / "worker.token"
    router = Router(RouterSettings(
        model_folder=str(folder), model_id="scripted", role="gateway", worker_token_file=str(token_file), port=0, **settings
    ))
    url = await router.start()
    session = aiohttp.ClientSession()
    net = Net(folder, router, url, session, token_file)
    try:
        yield net
    finally:
        for worker, shard in net.workers:
            await worker.stop()
            await shard.stop()
        await session.close()
        await router.stop()
