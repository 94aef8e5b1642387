"""The aiohttp application: what happens to every request before and after its route's handler."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import msgspec
from aiohttp import web

from headrace._common.errors import GenerationFailed, HeadraceError, Overloaded
from headrace._common.logs import ORIGIN
from headrace_router import sse
from headrace_router.api import request_ids
from headrace_router.api.caller import CALLER, identify
from headrace_router.api.cors import Cors
from headrace_router.api.docs import DOCS, Docs
from headrace_router.api.docs_page import make_page
from headrace_router.api.errors import answer, event, from_http
from headrace_router.api.openapi import make_document
from headrace_router.api.routes import ROUTES, Handler
from headrace_router.service import SERVICE, Service

log = logging.getLogger(__name__)

PUBLIC = frozenset(route.path for route in ROUTES if route.public)

CORS: web.AppKey[Cors] = web.AppKey("cors", Cors)
ID: web.RequestKey[str] = web.RequestKey("id", str)


@web.middleware
async def name_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, for its answer and for the log lines of its task."""
    origin = request_ids.origin(request.headers)
    request[ID] = origin.request_id
    ORIGIN.set(origin)
    return await handler(request)


@web.middleware
async def preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser that asks what it may ask: without a key, since it cannot send one."""
    if request.method == "OPTIONS":
        headers = request.app[CORS].preflight(request.headers)
        refusal = request.match_info.http_exception
        if headers is not None and not isinstance(refusal, web.HTTPNotFound):
            return web.Response(status=204, headers=headers)
    return await handler(request)


@web.middleware
async def errors_and_auth(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a POST through to its handler only from those who may, and make an answer of whatever goes wrong."""
    service = request.app[SERVICE]
    try:
        if request.method != "POST" or request.path in PUBLIC:
            return await handler(request)
        caller = request[CALLER] = identify(request.headers, service.tenants)
        with service.meters.call(caller.tenant):
            return await handler(request)
    except HeadraceError as error:
        if isinstance(error, Overloaded) and CALLER in request:
            _refused(request, error)
        return answer(request.path, error)
    except web.HTTPException as error:
        ours = from_http(error)
        if ours is None:
            raise
        made = answer(request.path, ours)
        made.headers.update({k: v for k, v in error.headers.items() if k == "Allow"})
        return made
    except ConnectionError:
        return web.Response()  # the client is gone: nobody reads this
    except Exception:  # the last fence: a slip of ours is one request's error, and is logged
        log.exception("internal error in %s %s", request.method, request.match_info.route.resource)
        return await _internal_error(request)


def _refused(request: web.Request, error: Overloaded) -> None:
    caller, service = request[CALLER], request.app[SERVICE]
    service.metrics.refused(caller.tenant.name, caller.workload, error.reason)
    if service.network is not None:
        service.network.gateway.metrics.rejects[error.reason] += 1
    log.info("refused: %s (%s)", error, error.reason)


async def _internal_error(request: web.Request) -> web.StreamResponse:
    """As an answer, or as the last event of a stream whose headers are out."""
    error = GenerationFailed("internal error")
    stream: web.StreamResponse | None = request.get(sse.STREAM)
    if stream is None:
        return answer(request.path, error)
    with contextlib.suppress(ConnectionError):
        await stream.write(event(request.path, error))
        await stream.write_eof()
    return stream


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """What every answer says: the request's id, what is left of the tenant's limits, who may read it."""
    headers = response.headers
    headers[request_ids.HEADER] = request[ID]
    headers["Server"] = "headrace"
    headers.update(request.app[CORS].headers(request.headers))
    if (caller := request.get(CALLER)) is not None:
        headers.update(request.app[SERVICE].meters.of(caller.tenant).headers())


def make_app(service: Service, cors: Cors) -> web.Application:
    """The application of a service that is ready to run."""
    app = web.Application(middlewares=[name_request, preflights, errors_and_auth])
    app[SERVICE] = service
    app[sse.SENDER] = sse.Sender()
    app[CORS] = cors
    document = make_document(ROUTES)
    app[DOCS] = Docs(msgspec.json.encode(document), make_page(document).encode())
    add: dict[str, Callable[[str, Handler], web.RouteDef]] = {"GET": web.get, "POST": web.post, "DELETE": web.delete}
    app.add_routes([add[route.method](route.path, route.handler) for route in ROUTES])
    app.on_response_prepare.append(add_headers)
    return app
