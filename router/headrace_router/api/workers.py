"""The network's side doors: where workers dial in, and who is there."""

from __future__ import annotations

import asyncio
import time

import msgspec
from aiohttp import WSMsgType, web
from msgspec import Struct

from headrace._common.errors import Forbidden, NotFound, Unauthorized
from headrace_router.api import workers_page
from headrace_router.network import frames
from headrace_router.network.gateway import Terms
from headrace_router.network.role import LEASE_SECONDS, MOST_SLOTS, Network
from headrace_router.network.session import Session
from headrace_router.network.tokens import WorkerToken
from headrace_router.service import SERVICE

HELLO_SECONDS = 10.0


class WorkerOut(Struct):
    """A connected worker."""

    session: str
    token: str  # id of its token
    agent: str
    model: str
    weight_format: str
    tier: str  # owner, trusted, open or probation
    state: str  # idle, working, paused or leaving
    slots: int
    running: int
    tokens: int  # since it joined
    tokens_per_second: float
    round_trip_ms: float | None  # None: not measured yet
    connected: int  # Unix time


class QueueOut(Struct):
    """Requests that wait, by workload class."""

    chat: int
    agent: int
    document: int


class WorkersOut(Struct):
    """The network as it is now. `queue` and `running` count requests."""

    gateway: str
    model: str
    time: int  # Unix time
    workers: list[WorkerOut]
    slots: int
    tokens_per_second: float
    queue: int
    queue_by_class: QueueOut
    queue_tokens: int
    running: int


class Registered(Struct):
    """A new worker's token, which is told this once."""

    token: str
    tier: str


def network_of(request: web.Request) -> Network:
    """
    Raises:
        NotFound: this server is no gateway.
    """
    network = request.app[SERVICE].network
    if network is None:
        raise NotFound("only a server with --role gateway has this route")
    return network


async def workers(request: web.Request) -> web.Response:
    """Who is connected, and what they do."""
    gateway, service = network_of(request).gateway, request.app[SERVICE]
    rows = [_row(session) for session in gateway.sessions.values()]
    body = WorkersOut(
        gateway.id, service.model_name, int(time.time()), rows, sum(row.slots for row in rows),
        round(sum(row.tokens_per_second for row in rows), 1), gateway.waiting, QueueOut(**gateway.broker.waiting_by_class),
        gateway.waiting_tokens, gateway.running,
    )
    return web.Response(
        body=msgspec.json.encode(body), content_type="application/json", headers={"Cache-Control": "no-store"}
    )


def _row(session: Session) -> WorkerOut:
    way = session.round_trip
    return WorkerOut(
        session.id, session.worker, session.hello.agent[:64], session.model.id[:256], session.model.format[:32], session.tier,
        session.state, session.slots, len(session.outputs), session.tokens, round(session.tokens_per_second, 1),
        None if way is None else round(way * 1000, 1), int(session.connected),
    )


async def page(request: web.Request) -> web.Response:
    """The same for people: a page that reads GET /v1/workers."""
    network_of(request)
    return web.Response(
        text=workers_page.PAGE, content_type="text/html", charset="utf-8",
        headers={"Content-Security-Policy": workers_page.POLICY},
    )


async def connect(request: web.Request) -> web.StreamResponse:
    """The WebSocket of a worker. Who may not come in is told so before the upgrade.

    Raises:
        Unauthorized: no token that is known.
    """
    network = network_of(request)
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    worker = network.tokens.find(token.strip()) if scheme.lower() == "bearer" else None
    if worker is None:
        raise Unauthorized("a valid worker token is needed: `Authorization: Bearer wk_...`")
    offered = {name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",")}
    protocol = next((name for name in frames.PROTOCOLS if name in offered), None)
    if protocol is None:
        text = f"the worker protocol must be one of {', '.join(frames.PROTOCOLS)}"
        return web.json_response(
            {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": "protocol"}}, status=426,
            headers={"Upgrade": "websocket", "Connection": "Upgrade"},
        )
    socket = web.WebSocketResponse(
        protocols=(protocol,), heartbeat=frames.HEARTBEAT, max_msg_size=frames.MAX_FRAME, compress=False, timeout=2.0
    )
    await socket.prepare(request)
    await _serve(request, network, socket, frames.Codec(protocol, frames.FromWorker), worker)
    return socket


async def _serve(
    request: web.Request, network: Network, socket: web.WebSocketResponse, codec: frames.Codec, worker: WorkerToken
) -> None:
    try:
        hello = await _hello(socket, codec)
    except (TimeoutError, frames.Malformed):
        await socket.close(code=4400, message=b"the first frame must be a hello, within 10 s")
        return
    code, reason = 4409, network.mismatch(hello)
    if reason is None and not worker.covers(hello.models[0].id):
        code, reason = 4403, f"the token is for {', '.join(worker.models)}, the worker serves {hello.models[0].id[:200]}"
    if reason is not None:
        refusal = codec.encode(frames.Refusal(code, reason))
        await (socket.send_str(refusal.decode()) if codec.is_text else socket.send_bytes(refusal))
        await socket.close(code=code, message=reason.encode()[:120])
        return
    transport = request.transport
    assert transport is not None
    terms = Terms(worker.id, worker.tier, min(hello.slots, worker.slots or MOST_SLOTS, MOST_SLOTS), network.model_id)
    await network.gateway.serve_worker(socket, transport.abort, codec, hello, terms, LEASE_SECONDS)


async def register(request: web.Request) -> web.Response:
    """A token of tier open, for who asks.

    Raises:
        Forbidden: this gateway takes no strangers.
        RateLimited: too many have asked.
    """
    network = network_of(request)
    if network.registrar is None:
        raise Forbidden("this gateway takes no strangers: ask its operator for a worker token")
    body = Registered(network.registrar.register(request.remote or ""), "open")
    return web.Response(body=msgspec.json.encode(body), status=201, content_type="application/json")


async def _hello(socket: web.WebSocketResponse, codec: frames.Codec) -> frames.Hello:
    async with asyncio.timeout(HELLO_SECONDS):
        message = await socket.receive()
    frame = codec.decode(message.data) if message.type in (WSMsgType.TEXT, WSMsgType.BINARY) else None
    if not isinstance(frame, frames.Hello):
        raise frames.Malformed("no hello")
    return frame
