"""Connections that do not wait for ever: aiohttp's server protocol with limits on the time that clients take.

- A request's head must be whole `client_timeout` seconds after its first byte, or after the connection was made.
- While more is buffered for a client than the transport likes, it must take something, or its connection is cut.
- What cannot be parsed is answered as JSON, in the shape of all other errors.
Bodies have their own limit, in `api/bodies.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError, LineTooLong
from aiohttp.web_request import BaseRequest

from headrace._common.errors import GenerationFailed, HeadersTooLarge, HeadraceError, MalformedBody, TooSlow, UriTooLong
from headrace_router.api.errors import answer
from headrace_router.api.request_ids import HEADER, origin

log = logging.getLogger(__name__)

LINE_LIMIT = 8192  # bytes of the first line
FIELD_LIMIT = 8190  # bytes of one header: another number, so that the errors can be told apart
HEADERS = 128
KEEP_ALIVE = 75.0  # seconds between two requests: longer than the proxies in front
LEAST_RATE = 100  # bytes a second that a client must take while there is too much for it


class Timer:
    """Calls something once, unless it is stopped before."""

    __slots__ = ("_call", "_handle")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float) -> None:
        self._handle = asyncio.get_running_loop().call_later(seconds, self._ring)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        self._call()


class Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ("_client_timeout", "_head_begun", "_head_timer", "_unread", "_write_timer")

    def __init__(self, manager: web.Server, client_timeout: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._client_timeout = client_timeout
        self._head_timer = Timer(self._head_late)
        self._head_begun = False  # something has come of a head that is not whole
        self._write_timer = Timer(self._check_reader)
        self._unread = 0  # bytes in the transport's buffer when the timer was set

    # --- heads ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._head_timer.start(self._client_timeout)

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._head_timer.stop()
            self._head_begun = False
        elif not before or (self._waiter is not None and not self._waiter.done()):  # not within a request
            self._head_begun = True
            if not self._head_timer.running:
                self._head_timer.start(self._client_timeout)

    def _head_late(self) -> None:
        if self.transport is not None and self._head_begun:
            made = answer("/", TooSlow(f"the head of the request was not whole after {self._client_timeout:g} s"))
            assert isinstance(made.body, bytes)
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(made.body), made.body)
            )
        self.force_close()

    # --- answers ---

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer.stop()

    def _watch_writing(self) -> None:
        assert self.transport is not None
        self._unread = self.transport.get_write_buffer_size()
        self._write_timer.start(self._client_timeout)

    def _check_reader(self) -> None:
        if self.transport is None:
            return
        taken = self._unread - self.transport.get_write_buffer_size()
        if taken < 0 or taken >= LEAST_RATE * self._client_timeout:  # below 0: more was written, so that nothing is known
            self._watch_writing()
        else:
            log.info("a client is cut off: it took %d bytes in %g s", taken, self._client_timeout)
            self.transport.abort()

    def connection_lost(self, error: BaseException | None) -> None:
        self._head_timer.stop()
        self._write_timer.stop()
        super().connection_lost(error)

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what aiohttp could not parse. What the client sent is neither shown nor logged."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of another answer is on its way")
        if not isinstance(exc, HttpProcessingError):
            log.error("internal error outside of a handler", exc_info=exc)
        made = answer(request.path, _as_ours(exc))
        made.headers.update({HEADER: origin(request.headers).request_id, "Server": "headrace"})
        made.force_close()
        return made


def _as_ours(error: BaseException | None) -> HeadraceError:
    if isinstance(error, LineTooLong):
        if LINE_LIMIT in error.args:
            return UriTooLong(f"the first line of the request is longer than {LINE_LIMIT} bytes")
        return HeadersTooLarge(f"a header is longer than {FIELD_LIMIT} bytes")
    if isinstance(error, BadHttpMessage) and "Too many headers" in error.message:
        return HeadersTooLarge(f"there are more than {HEADERS} headers")
    if isinstance(error, BadHttpMessage):
        return MalformedBody("this is not HTTP/1.1 as RFC 9112 has it")
    return GenerationFailed("internal error")


class _Server(web.Server):
    """Makes connections of our kind."""

    def __init__(self, like: web.Server, client_timeout: float) -> None:
        super().__init__(
            like.request_handler, request_factory=like.request_factory, handler_cancellation=True, **like._kwargs
        )
        self._client_timeout = client_timeout

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._client_timeout, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application on such connections; who hangs up cancels the handler."""

    def __init__(self, app: web.Application, client_timeout: float, **options: Any) -> None:
        super().__init__(
            app, access_log=None, keepalive_timeout=KEEP_ALIVE, max_line_size=LINE_LIMIT, max_field_size=FIELD_LIMIT,
            max_headers=HEADERS, **options,
        )
        self._client_timeout = client_timeout

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self._client_timeout)
