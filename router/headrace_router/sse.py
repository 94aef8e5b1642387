"""Server-Sent Events: preformatted frames (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

from aiohttp import web

KEEP_ALIVE_SECONDS = 15.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
STREAM: web.RequestKey[web.StreamResponse] = web.RequestKey("stream", web.StreamResponse)  # once its headers are out
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


# line breaks to some readers, though not to JSON
_BREAKS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))


def frame(data: bytes, name: str | None = None) -> bytes:
    """One event. `data` is JSON in UTF-8, which holds no CR and LF. `name`: of the kind of event, where an API names them."""
    if not data.isascii():
        for raw, escaped in _BREAKS:
            data = data.replace(raw, escaped)
    head = f"event: {name}\n".encode() if name is not None else b""
    return head + b"data: " + data + b"\n\n"


async def open_stream(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    """Send the response headers now, before there is anything to say."""
    response = web.StreamResponse(headers={**HEADERS, **headers})
    await response.prepare(request)
    request[STREAM] = response
    return response
