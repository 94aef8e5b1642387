"""Streams over the network that outlive their connections: their events' ids, and who may come back for them.

Another reader goes on at /v1/requests/{X-Request-Id}/events, after the event whose id it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from headrace._common.errors import HeadraceError, InvalidRequest
from headrace_router import sse
from headrace_router.network.job_stream import JobStream
from headrace_router.service import Service
from headrace_router.streams import TokenStream

IDS_HEADER = "X-Headrace-Event-Ids"
IDS_QUERY = "event_ids"
LOOK_SECONDS = 0.25  # between looks for a reader


def wants_ids(request: web.Request, default: bool) -> bool:
    """Are the events of a call to have ids? `default`: of its API, whose clients all take them, or not.

    Raises:
        InvalidRequest: it asks for neither true nor false.
    """
    given = request.headers.get(IDS_HEADER) or request.query.get(IDS_QUERY)
    if given not in (None, "true", "false"):
        raise InvalidRequest(f"{IDS_HEADER} and {IDS_QUERY} must be true or false", IDS_HEADER)
    return default if given is None else given == "true"


def numbered(stream: TokenStream) -> Callable[[bytes], bytes]:
    """What adds the `id:` line to the frames of each token of a `lasting` stream, in turn, if it has ids."""
    names = stream.names if isinstance(stream, JobStream) else None
    return (lambda frames: frames) if names is None else (lambda frames: sse.with_id(frames, names.popleft()))


@contextlib.asynccontextmanager
async def lasting(service: Service, stream: TokenStream, ids: bool) -> AsyncIterator[TokenStream]:
    """The stream of an answer, once it is accepted, for as long as its client is there and `--disconnect-grace` longer.

    `ids`: its events are to have ids.

    Raises:
        QueueFull: it is not accepted.
    """
    grace, held = service.settings.disconnect_grace, False
    try:
        if isinstance(stream, JobStream):
            if ids:
                stream.number()
            await asyncio.shield(stream.admitted)
        yield stream
    except (asyncio.CancelledError, ConnectionError):
        if isinstance(stream, JobStream) and not stream.done and grace > 0 and not service.draining:
            hold(service, stream, grace)
            held = True
        raise
    finally:
        if not held:
            stream.close()


def hold(service: Service, stream: JobStream, grace: float | None = None) -> None:
    """Read a request's stream to its end: its tokens are in the log, what it costs is settled here.

    `grace`: seconds without a reader of its events after which it is given up; None: it goes on whoever listens.
    """
    task = asyncio.create_task(_held(service, stream, grace))
    service.background.add(task)
    task.add_done_callback(service.background.discard)


async def _held(service: Service, stream: JobStream, grace: float | None) -> None:
    assert service.network is not None
    gateway, alone = service.network.gateway, time.monotonic()
    async with stream:
        while not stream.done:
            with contextlib.suppress(TimeoutError, HeadraceError):  # the log says what went wrong
                async with asyncio.timeout(None if grace is None else LOOK_SECONDS):
                    await stream.read()
            if grace is None or gateway.is_read(stream.job):
                alone = time.monotonic()
            elif time.monotonic() - alone >= grace:
                return
