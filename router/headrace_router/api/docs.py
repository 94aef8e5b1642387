"""The OpenAPI document and its page: made once for an application, of its routes."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web


@dataclass(frozen=True)
class Docs:
    """Both, as they are sent."""

    document: bytes  # JSON
    page: bytes  # HTML


DOCS: web.AppKey[Docs] = web.AppKey("docs", Docs)

# nothing is loaded and nothing runs
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


async def document(request: web.Request) -> web.Response:
    """The OpenAPI document."""
    return web.Response(body=request.app[DOCS].document, content_type="application/json")


async def page(request: web.Request) -> web.Response:
    """A page for people."""
    return web.Response(
        body=request.app[DOCS].page, content_type="text/html", charset="utf-8",
        headers={"Content-Security-Policy": POLICY},
    )
