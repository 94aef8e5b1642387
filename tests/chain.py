"""`make demo-chain`: one request through everything there is, with an ear at each station.

    model -> shard's gRPC stream -> batcher -> SSE -> agent -> WebSocket -> gateway -> token log -> SSE -> client

The shard and the router in front of it are a server of their own; `headrace worker --upstream` lends it to a gateway. Ears
pass on what they hear as it comes: one between shard and router, one between router and agent, one between agent and gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.processes import embedded_model
from headrace._common.tokenizing import Tokenizer
from headrace.v1 import generation_pb2 as pb
from headrace_router.network import frames
from tests.networks import workers
from tests.processes import CHANNEL_OPTIONS, START, Command, Process, Service, ShardProcess, free_port

QUESTION = "The wheel of a water mill turns because"
TOKENS = 48
UNMETERED: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=None), "auto_decompress": False}


@dataclass
class Station:
    """What was heard at one place: (token id, text) of each token, and time.monotonic() when it came by."""

    name: str
    tokens: list[tuple[int, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def hear(self, token: int, text: str) -> None:
        self.tokens.append((token, text))
        self.times.append(time.monotonic())

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.tokens)


@dataclass
class Journey:
    """A request's way. `logs`: what the process of each name has written; `request`: its id at the gateway."""

    request: str
    stations: list[Station]
    logs: dict[str, str]
    result: dict[str, Any]


class ShardEar(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Between router and shard: every call goes through byte by byte; tokens of Steps are noted."""

    def __init__(self, target: str, station: Station, text_of: Callable[[Sequence[int]], str]) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._station, self._text_of = station, text_of
        self._ids: list[int] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = handler_call_details.method

        async def steps(request: bytes, context: Any) -> AsyncIterator[bytes]:
            async for step in self._channel.unary_stream(method)(request):
                self._note(step)
                yield step

        async def once(request: bytes, context: Any) -> bytes:
            answer: bytes = await self._channel.unary_unary(method)(request)
            return answer

        if method.endswith(("/Prefill", "/Decode")):
            return grpc.unary_stream_rpc_method_handler(steps)
        return grpc.unary_unary_rpc_method_handler(once)

    def _note(self, step: bytes) -> None:
        for token in pb.Step.FromString(step).intermediates.token_id:
            before = self._text_of(self._ids)
            self._ids.append(token)
            self._station.hear(token, self._text_of(self._ids)[len(before) :])


def http_ear(target: str, station: Station) -> web.Application:
    """Between the server and the agent: answers pass on as they come; tokens of SSE events are noted."""

    async def pass_on(request: web.Request) -> web.StreamResponse:
        given: dict[str, Any] = {"headers": request.headers, "data": await request.read()}
        async with (
            aiohttp.ClientSession(**UNMETERED) as session,
            session.request(request.method, target + request.path_qs, **given) as reply,
        ):
            answer = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.headers["Content-Type"]})
            await answer.prepare(request)
            async for line in reply.content:
                if line.startswith(b"data:") and "token" in (event := json.loads(line[5:])):
                    token = event["token"]
                    station.hear(token["id"], "" if token["special"] else token["text"])
                await answer.write(line)
            return answer

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pass_on)
    return app


def socket_ear(target: str, station: Station) -> web.Application:
    """Between agent and gateway: frames pass on both ways; rows of text are noted."""

    async def connect(request: web.Request) -> web.WebSocketResponse:
        offered = [name.strip() for name in request.headers["Sec-WebSocket-Protocol"].split(",")]
        headers = {"Authorization": request.headers["Authorization"]}
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(target + frames.PATH, headers=headers, protocols=offered, max_msg_size=0) as there,
        ):
            here = web.WebSocketResponse(protocols=[there.protocol or ""], max_msg_size=0)
            await here.prepare(request)
            codec = frames.Codec(there.protocol or "", frames.FromWorker)

            def note(data: bytes | str) -> None:
                frame = codec.decode(data)
                for row in frame.x if isinstance(frame, frames.TextStep) else ():
                    station.hear(-1 if row[4] is None else row[4], row[3])

            await _first(_pump(here, there, note), _pump(there, here, lambda data: None))
            await here.close()
        return here

    app = web.Application()
    app.router.add_get(frames.PATH, connect)
    return app


async def _pump(source: Any, sink: Any, note: Callable[[bytes | str], None]) -> None:
    async for message in source:
        note(message.data)
        await (sink.send_str if message.type is aiohttp.WSMsgType.TEXT else sink.send_bytes)(message.data)


async def _first(*works: Awaitable[None]) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _listen(stack: contextlib.AsyncExitStack, app: web.Application) -> str:
    """Serve an ear; its address, without the scheme."""
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return "127.0.0.1:{1}".format(*runner.addresses[0])


async def walk(model: Path, name: str, folder: Path, question: str = QUESTION, tokens: int = TOKENS) -> Journey:
    """Build the chain around a model folder and send one request through it. `name`: of the model."""
    at = [Station(name) for name in ("shard's gRPC stream", "server's SSE", "worker's WebSocket", "token log", "client's SSE")]
    processes: dict[str, Process] = {}
    async with contextlib.AsyncExitStack() as stack:

        def keep(name: str, process: Process) -> Any:
            processes[name] = process
            stack.callback(process.stop)
            return process

        shard = keep("shard", ShardProcess(model))
        token_file = folder / "worker.token"
        gateway = keep("gateway", Service("--model-id", name, "--role", "gateway", "--worker-token-file", str(token_file)))
        await asyncio.to_thread(shard.wait_ready)
        tokenizer = Tokenizer(model / "tokenizer.json")
        ear = grpc.aio.server(options=CHANNEL_OPTIONS)
        ear.add_generic_rpc_handlers(
            [ShardEar(f"unix:{shard.socket}", at[0], lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))]
        )
        target = f"unix:{folder}/ear"
        ear.add_insecure_port(target)
        await ear.start()
        stack.push_async_callback(ear.stop, None)
        port = free_port()
        own = ("--model-folder", str(model), "--model-id", Path(name).name, "--shard-target", target, "--port", str(port))
        server = keep("server", Process("headrace_router", *own))
        await asyncio.to_thread(_wait, processes, lambda: "listening on" in server.log())
        upstream = await _listen(stack, http_ear(f"http://127.0.0.1:{port}", at[1]))
        await asyncio.to_thread(gateway.wait_ready)
        door = await _listen(stack, socket_ear(gateway.url.replace("http", "ws"), at[2]))
        keep("worker", Command(
            "worker", "--upstream", f"http://{upstream}", "--gateway", f"ws://{door}", "--worker-token-file", str(token_file),
        ))
        await asyncio.to_thread(_wait, processes, lambda: len(workers(gateway.url)["workers"]) == 1)
        request, result = await _ask(gateway.url, question, tokens, at[4], at[3])
        await asyncio.sleep(0.1)  # the last log lines
    return Journey(request, at, {name: process.log() for name, process in processes.items()}, result)


def _wait(processes: dict[str, Process], true: Callable[[], bool]) -> None:
    end = time.monotonic() + START
    while not true():
        for name, process in processes.items():
            process.check_alive()
            assert time.monotonic() < end, f"{name}: {process.log()}"
        time.sleep(0.05)


async def _ask(url: str, question: str, tokens: int, client: Station, log: Station) -> tuple[str, dict[str, Any]]:
    """Stream one request; then read its log again from the start."""
    body = {"inputs": question, "parameters": {"max_new_tokens": tokens}}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/requests", json=body) as reply:
            request = (await reply.json())["id"]
        for station in (client, log):
            last: dict[str, Any] = {}
            async with session.get(f"{url}/v1/requests/{request}/events") as events:
                kind = ""
                async for line in events.content:
                    if line.startswith(b"event:"):
                        kind = line[6:].decode().strip()
                    elif line.startswith(b"data:"):
                        last = json.loads(line[5:])
                        if kind == "token":
                            station.hear(last["id"], last["text"])
    return request, {"kind": kind, **last}


def main() -> int:
    """Show one request at every station. Exit status 1 if a station heard something else."""
    model = embedded_model()
    with tempfile.TemporaryDirectory(prefix="headrace-chain-") as folder:
        journey = asyncio.run(walk(model, str(model), Path(folder)))
    shard, client = journey.stations[0], journey.stations[-1]
    print(f"\n{QUESTION}\n")
    for station in journey.stations:
        print(f"{station.name:20} {len(station.tokens)} tokens  {station.text[:90]!r}...")
    same = all(station.tokens == client.tokens for station in journey.stations)
    lead = shard.times[-1] - client.times[1]
    named = [name for name, log in journey.logs.items() if journey.request in log]
    print(f"\nthe same tokens and text at every station: {same}")
    print(f"the second token is at the client {lead * 1e3:.0f} ms before the shard has computed the last one")
    print(f"request {journey.request} is in the logs of: {', '.join(named)}")
    return 0 if same and lead > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
