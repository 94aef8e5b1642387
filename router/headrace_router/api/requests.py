"""Requests that outlive their connections: POST /v1/requests, their state, their events for any number of readers.

Only a gateway has them. Events are named by the SSE `event` line; their ids say after which one a reader goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from headrace._common.errors import Conflict, HeadraceError, InvalidRequest, NotFound
from headrace_router import sse
from headrace_router.api import native_types
from headrace_router.api.bodies import decode, read_body
from headrace_router.api.caller import CALLER, identify
from headrace_router.api.native_requests import prepare
from headrace_router.api.workers import network_of
from headrace_router.network.gateway import JobStream
from headrace_router.network.jobs import TERMINAL, Event, JobStatus
from headrace_router.network.role import Network
from headrace_router.service import SERVICE, Service, Ticket
from headrace_router.types import GenerateRequest

POSITION_SECONDS = 1.0  # between looks at the position of a request that waits
EVENT_ID = re.compile(r"\d{1,9}-(\d{1,9})")
_encode = msgspec.json.Encoder().encode


class Accepted(Struct):
    """A request that was taken."""

    id: str
    position: int  # requests before it


class UsageOut(Struct):
    prompt_tokens: int
    completion_tokens: int


class RequestOut(Struct):
    """The state of a request."""

    id: str
    state: str  # queued, leased, done, failed, cancelled or expired
    attempt: int  # workers that have had it
    tokens: int
    position: int | None = None  # while it is queued
    result: dict[str, Any] | None = None  # the terminal event


class QueuedEvent(Struct):
    position: int
    size: int


class StartedEvent(Struct):
    attempt: int


class ResumedEvent(Struct):
    from_index: int


class ResetEvent(Struct):
    """The output begins again: tokens before this are void."""

    from_index: int


class TokenEvent(Struct):
    index: int
    id: int
    text: str
    logprob: float | None
    special: bool
    top_tokens: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class DoneEvent(Struct):
    finish_reason: str
    text: str
    seed: int | None
    usage: UsageOut


class FailedEvent(Struct):
    code: str
    message: str
    retriable: bool


class CancelledEvent(Struct):
    by: str


class ExpiredEvent(Struct):
    which: str


EVENTS = (
    QueuedEvent, StartedEvent, ResumedEvent, ResetEvent, TokenEvent, DoneEvent, FailedEvent, CancelledEvent, ExpiredEvent,
)  # what the events of each kind hold


async def create(request: web.Request) -> web.Response:
    """Take a request, as /generate does; it runs whoever listens.

    Raises:
        QueueFull: as many wait as may, or there is no worker. Nothing of the request is kept.
    """
    network, service = network_of(request), request.app[SERVICE]
    data = await read_body(request, service.settings.payload_limit)
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return await _take(request, service, data)
    return await _once(request, network, service, f"{request[CALLER].tenant.name}/{key[:256]}", data)


async def _once(request: web.Request, network: Network, service: Service, key: str, data: bytes) -> web.Response:
    """Take a request whose client may ask again with the same key: it is the same request then.

    Raises:
        Conflict: the body is another.
    """
    digest = hashlib.sha256(data).digest()
    async with network.keys_lock(key):
        known = network.keys.get(key)
        if known is not None and (status := await network.gateway.broker.status(known[1])) is not None:
            if known[0] != digest:
                raise Conflict("this Idempotency-Key was used for another request")
            return _accepted(known[1], status.position or 0)
        made = await _take(request, service, data)
        network.remember(key, digest, made.headers["Location"].rpartition("/")[2])
        return made


async def _take(request: web.Request, service: Service, data: bytes) -> web.Response:
    ticket = Ticket(service)
    with ticket:
        body = decode(native_types.generate_decoder, data)
        prepared = await prepare(service, body.inputs, body.parameters, request[CALLER], stream=True, full_text=False)
        ticket.submitted()
        wanted = prepared.requests[0]
        stream = service.engine.submit(wanted)
        assert isinstance(stream, JobStream)
        try:
            position = await asyncio.shield(stream.admitted)
        except BaseException:  # refused, or the client is gone before it has the id
            stream.close()
            raise
    task = asyncio.create_task(_run(service, wanted, stream))
    service.background.add(task)
    task.add_done_callback(service.background.discard)
    return _accepted(stream.job, position)


def _accepted(job: str, position: int) -> web.Response:
    body = _encode(Accepted(job, position))
    return web.Response(body=body, status=202, content_type="application/json", headers={"Location": f"/v1/requests/{job}"})


async def _run(service: Service, wanted: GenerateRequest, stream: JobStream) -> None:
    """Hold a request's stream to its end: its tokens are in the log, what it cost is settled here."""
    async with stream:
        try:
            async for _ in stream:
                pass
        except HeadraceError:
            return  # the log says so


async def show(request: web.Request) -> web.Response:
    """The state of a request."""
    network = network_of(request)
    name, status = await _own(request, network)
    result = None if status.last is None else {"type": status.last.kind, **_data(status.last)}
    body = RequestOut(name, status.state, status.attempt, status.tokens, status.position, result)
    return web.Response(body=_encode(body), content_type="application/json")


async def delete(request: web.Request) -> web.Response:
    """Give a request up, queued or running; one that has ended stays as it is."""
    network = network_of(request)
    name, _ = await _own(request, network)
    await network.gateway.broker.cancel(name, "user")
    return web.Response(status=204)


async def _own(request: web.Request, network: Network) -> tuple[str, JobStatus]:
    """
    Raises:
        NotFound: there is no such request, or it is another tenant's.
    """
    caller = identify(request.headers, request.app[SERVICE].tenants)
    name = request.match_info["id"]
    status = await network.gateway.status(name)
    if status.job.request.tenant.name != caller.tenant.name:
        raise NotFound(f"there is no request {name[:64]}, or not any more")
    return name, status


async def events(request: web.Request) -> web.StreamResponse:
    """A request's events from the first, or from the one after `Last-Event-ID`; 204 after the last one."""
    network = network_of(request)
    name, status = await _own(request, network)
    after = _after(request)
    if status.last is not None and after >= status.last.seq:
        return web.Response(status=204)
    response = web.StreamResponse(headers=sse.HEADERS)
    await response.prepare(request)
    request[sse.STREAM] = response
    fresh = asyncio.Event()
    told: list[Event] = []

    def hear(news: Sequence[Event]) -> None:
        told.extend(news)
        fresh.set()

    leave = network.gateway.broker.subscribe(name, after, hear)
    try:
        await _tell(network, name, response, told, fresh)
        await response.write_eof()
    finally:
        leave()
    return response


async def _tell(
    network: Network, name: str, response: web.StreamResponse, told: list[Event], fresh: asyncio.Event
) -> None:
    """Write events as they come, up to the terminal one; positions while the request waits; a comment when it is silent."""
    loop, position = asyncio.get_running_loop(), -1
    written = loop.time()
    while True:
        status = await network.gateway.broker.status(name)
        if status is not None and status.position is not None and status.position != position and not told:
            position = status.position
            await response.write(_frame("queued", None, {"position": position, "size": network.gateway.waiting}))
            written = loop.time()
        if not told:
            try:
                async with asyncio.timeout(POSITION_SECONDS):
                    await fresh.wait()
            except TimeoutError:
                if loop.time() - written >= sse.KEEP_ALIVE_SECONDS:
                    await response.write(b": ping\n")
                    written = loop.time()
                continue
        fresh.clear()
        batch = told[:]
        told.clear()
        await response.write(b"".join(_frame(event.kind, event.id, _data(event)) for event in batch))
        written = loop.time()
        if batch[-1].kind in TERMINAL:
            return


def _after(request: web.Request) -> int:
    """
    Raises:
        InvalidRequest: the id is none of an event.
    """
    given = request.headers.get("Last-Event-ID") or request.query.get("after")
    if not given:
        return -1
    match = EVENT_ID.fullmatch(given)
    if match is None:
        raise InvalidRequest("Last-Event-ID must be the id of an event, as 1-17", "Last-Event-ID")
    return int(match[1])


def _frame(kind: str, event_id: str | None, data: dict[str, Any]) -> bytes:
    head = f"id: {event_id}\n" if event_id is not None else ""
    return f"{head}event: {kind}\n".encode() + sse.frame(_encode(data))


def _data(event: Event) -> dict[str, Any]:
    """What an event says."""
    if (token := event.token) is not None:
        made: dict[str, Any] = {
            "index": event.index, "id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special,
        }
        if token.top:
            made["top_tokens"] = [{"id": top.id, "logprob": top.logprob} for top in token.top]
        return made
    if (end := event.end) is not None:
        usage = UsageOut(end.input_length, end.generated_tokens)
        return {"finish_reason": end.finish_reason, "text": end.text, "seed": end.seed, "usage": usage}
    if event.kind == "started":
        return {"attempt": event.attempt}
    return dict(event.facts)
