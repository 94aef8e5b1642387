"""The aiohttp application: routes, authentication, errors as answers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from headrace._common.errors import GenerationFailed, HeadraceError
from headrace_router import sse
from headrace_router.api import admin, clouds, native, openai, tokens
from headrace_router.api.caller import CALLER, identify
from headrace_router.api.errors import answer, event, from_http
from headrace_router.service import SERVICE, Service

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors_and_auth(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a POST through to its handler only from those who may, and make an answer of whatever goes wrong."""
    service = request.app[SERVICE]
    try:
        if request.method == "POST":
            request[CALLER] = identify(request, service.tenants)
        return await handler(request)
    except HeadraceError as error:
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


def make_app(service: Service) -> web.Application:
    """The application of a service that is ready to run."""
    app = web.Application(middlewares=[errors_and_auth])
    app[SERVICE] = service
    app.add_routes([
        web.post("/", native.compat),
        web.post("/generate", native.generate),
        web.post("/generate_stream", native.generate_stream),
        web.post("/invocations", clouds.invocations),
        web.post("/vertex", clouds.vertex),
        web.post("/tokenize", tokens.tokenize),
        web.post("/detokenize", tokens.detokenize),
        web.post("/chat_tokenize", tokens.chat_tokenize),
        web.post("/v1/chat/completions", openai.chat_completions),
        web.post("/v1/completions", openai.completions),
        web.get("/", admin.health),
        web.get("/health", admin.health),
        web.get("/ping", admin.health),
        web.get("/ready", admin.ready),
        web.get("/info", admin.info),
        web.get("/metrics", admin.metrics),
        web.get("/v1/models", admin.models),
        web.get("/v1/models/{model:.+}", admin.model),
    ])
    return app
