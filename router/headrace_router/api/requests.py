"""Requests that outlive their connections: POST /v1/requests, their state, their events for any number of readers.

Only a gateway has them. Events are named by the SSE `event` line; their ids say after which one a reader goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from headrace._common.errors import BrokerUnavailable, InvalidRequest, RateLimited
from headrace_router import sse
from headrace_router.api import native_types
from headrace_router.api.bodies import decode, read_body
from headrace_router.api.caller import CALLER, identify
from headrace_router.api.lasting import hold
from headrace_router.api.native_requests import prepare
from headrace_router.api.workers import network_of
from headrace_router.network.gateway import Gateway
from headrace_router.network.job_stream import JobStream
from headrace_router.network.jobs import BEGINNING, TERMINAL, Event, EventId, JobStatus
from headrace_router.network.role import Network
from headrace_router.service import SERVICE, Service, Ticket

POSITION_SECONDS = 1.0  # between looks at the position of a request that waits
EVENT_ID = re.compile(r"(\d{1,9})-(\d{1,9})")
_encode = msgspec.json.Encoder().encode


class Accepted(Struct):
    """A request that was taken."""

    id: str
    position: int  # requests before it
    eta_s: float | None = None  # seconds until it is expected to begin, if anything is known of that


class UsageOut(Struct):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt
    queue_s: float
    inference_s: float


class RequestOut(Struct):
    """The state of a request."""

    id: str
    state: str  # queued, leased, done, failed, cancelled or expired
    attempt: int  # workers that have had it
    tokens: int
    position: int | None = None  # while it is queued
    eta_s: float | None = None  # seconds until it is expected to begin, if anything is known of that
    result: dict[str, Any] | None = None  # the terminal event


class QueuedEvent(Struct):
    position: int
    size: int
    eta_s: float | None


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
        RateLimited: as many of the tenant's have not ended as it may have at once.
    """
    network, service = network_of(request), request.app[SERVICE]
    data = await read_body(request, service.settings.payload_limit)
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return await _take(request, network, service, data)
    return await _once(request, network, service, f"{request[CALLER].tenant.name}/{key[:256]}", data)


async def _once(request: web.Request, network: Network, service: Service, key: str, data: bytes) -> web.Response:
    """Take a request whose client may ask again with the same key: it is the same request then.

    Raises:
        Conflict: the body is another.
    """
    broker = network.gateway.broker
    known = await broker.claim(key, hashlib.sha256(data).hexdigest())
    if known is not None:
        return await _accepted(network, known)
    job = None
    try:
        made = await _take(request, network, service, data)
        job = made.headers["Location"].rpartition("/")[2]
        return made
    finally:
        await broker.settle(key, job)


async def _take(request: web.Request, network: Network, service: Service, data: bytes) -> web.Response:
    tenant = request[CALLER].tenant
    most = tenant.quota.max_concurrent_requests
    if most is not None and await network.gateway.broker.live(tenant.name) >= most:
        raise RateLimited(f"the tenant {tenant.name} may have {most} requests at once", "concurrency", service.retry_after())
    with Ticket(service) as ticket:
        ticket.take(0)  # whether it runs is the queue's to say
        body = decode(native_types.generate_decoder, data)
        prepared = await prepare(service, body.inputs, body.parameters, request[CALLER], stream=True, full_text=False)
        ticket.submitted()
        wanted = prepared.requests[0]
        stream = service.engine.submit(wanted)
        assert isinstance(stream, JobStream)
        try:
            await asyncio.shield(stream.admitted)
        except BaseException:  # refused, or the client is gone before it has the id
            stream.close()
            raise
        stream.kept = True
    hold(service, stream)
    return await _accepted(network, stream.job)


async def _accepted(network: Network, job: str) -> web.Response:
    gateway = network.gateway
    status = await gateway.broker.status(job)
    body = Accepted(job, 0) if status is None else Accepted(job, status.position or 0, gateway.eta(status))
    headers = {"Location": f"/v1/requests/{job}"}
    return web.Response(body=_encode(body), status=202, content_type="application/json", headers=headers)


async def show(request: web.Request) -> web.Response:
    """The state of a request."""
    network = network_of(request)
    name, status = await _own(request, network)
    result = None if status.last is None else {"type": status.last.kind, **_data(status.last)}
    eta = network.gateway.eta(status)
    body = RequestOut(name, status.state, status.attempt, status.tokens, status.position, eta, result)
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
        Gone: it has ended too long ago.
    """
    caller = identify(request.headers, request.app[SERVICE].tenants)
    return await network.gateway.find(caller.tenant.name, request.match_info["id"])


async def events(request: web.Request) -> web.StreamResponse:
    """A request's events from the first, or from the one after `Last-Event-ID`; 204 after the last one."""
    network = network_of(request)
    name, status = await _own(request, network)
    after = _after(request)
    if status.last is not None and after >= status.last.id:
        return web.Response(status=204)
    response = web.StreamResponse(headers=sse.HEADERS)
    await response.prepare(request)
    request[sse.STREAM] = response
    fresh = asyncio.Event()
    told: list[Event] = []

    def hear(news: Sequence[Event]) -> None:
        told.extend(news)
        fresh.set()

    gateway = network.gateway
    gateway.metrics.resumes += after != BEGINNING
    with gateway.reading(name):
        leave = await gateway.broker.subscribe(name, after, hear)
        try:
            await _tell(gateway, name, response, told, fresh)
            await response.write_eof()
        finally:
            leave()
    return response


async def _tell(
    gateway: Gateway, name: str, response: web.StreamResponse, told: list[Event], fresh: asyncio.Event
) -> None:
    """Write events as they come, up to the terminal one; positions while the request waits; a comment when it is silent."""
    loop, position = asyncio.get_running_loop(), -1
    written = loop.time()
    while True:
        status = None
        with contextlib.suppress(BrokerUnavailable):  # it may come back before it matters
            status = await gateway.broker.status(name)
        if status is not None and status.position is not None and status.position != position and not told:
            position = status.position
            facts = {"position": position, "size": gateway.waiting, "eta_s": gateway.eta(status)}
            await response.write(_frame("queued", None, facts))
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
        await response.write(b"".join(_frame(event.kind, event.name, _data(event)) for event in batch))
        written = loop.time()
        if batch[-1].kind in TERMINAL:
            return


def _after(request: web.Request) -> EventId:
    """
    Raises:
        InvalidRequest: the id is none of an event.
    """
    given = request.headers.get("Last-Event-ID") or request.query.get("after")
    if not given:
        return BEGINNING
    match = EVENT_ID.fullmatch(given)
    if match is None:
        raise InvalidRequest("Last-Event-ID must be the id of an event, as 1-17", "Last-Event-ID")
    return int(match[1]), int(match[2])


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
        usage = UsageOut(
            end.input_length, end.generated_tokens, end.cached_tokens, round(end.queue_seconds, 3),
            round(end.inference_seconds, 3),
        )
        return {"finish_reason": end.finish_reason, "text": end.text, "seed": end.seed, "usage": usage}
    if event.kind == "started":
        return {"attempt": event.attempt}
    return dict(event.facts)
