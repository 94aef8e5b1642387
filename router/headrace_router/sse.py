"""Server-Sent Events at the price of a write (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Preformatted frames go straight to the connection's transport, in the chunked coding that aiohttp's own writer uses (RFC
9112, section 7.1; a test compares them byte for byte). One `Sender` serves all streams of a router: it writes what has
arrived for each of them once a turn of the event loop, so that a token costs no task and no timer, and tokens that arrive
together leave together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from headrace_router.streams import TokenStream
from headrace_router.types import Token

KEEP_ALIVE_SECONDS = 15.0
SWEEPS = 15  # looks for silent streams in that time
PING = b": ping\n"  # without a blank line: after an `id:` that would be an empty event to some readers
DONE = b"data: [DONE]\n\n"
STREAM: web.RequestKey[web.StreamResponse] = web.RequestKey("stream", web.StreamResponse)  # once its headers are out
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

# line breaks to some readers, though not to JSON
_BREAKS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))
_HOLE = "\x00"

Frames = Callable[[int, Token], bytes]  # (index of the stream, token) -> its frames; b"" if it has nothing to say


def frame(data: bytes, name: str | None = None) -> bytes:
    """One event. `data` is JSON in UTF-8, which holds no CR and LF. `name`: of the kind of event, where an API names them."""
    head = f"event: {name}\n".encode() if name is not None else b""
    return head + b"data: " + _unbroken(data) + b"\n\n"


def with_id(frames: bytes, name: str) -> bytes:
    """The events of one token, with its id on the last of them: who has that one has read the token."""
    if not frames:
        return frames
    before, end, last = frames[:-2].rpartition(b"\n\n")
    return b"%b%bid: %b\n%b\n\n" % (before, end, name.encode(), last)


def _unbroken(data: bytes) -> bytes:
    if not data.isascii():
        for raw, escaped in _BREAKS:
            data = data.replace(raw, escaped)
    return data


class FrameOfText:
    """Frames that are equal but for one text."""

    __slots__ = ("_after", "_before", "_encode")

    def __init__(self, data: Callable[[str], bytes]) -> None:
        """`data` makes the JSON of an event of the text; it is called once."""
        self._encode = msgspec.json.Encoder().encode
        self._before, self._after = frame(data(_HOLE)).split(self._encode(_HOLE))

    def __call__(self, text: str) -> bytes:
        return self._before + _unbroken(self._encode(text)) + self._after


class EventStream:
    """One response whose headers are out. The handler waits in `relay`; what arrives meanwhile, the `Sender` writes."""

    __slots__ = (
        "_chunked", "_drainer", "_due", "_frames", "_over", "_protocol", "_rest", "_sender", "_streams", "_transport",
        "_writer", "response", "written",
    )

    def __init__(
        self, sender: Sender, request: web.Request, response: web.StreamResponse, writer: AbstractStreamWriter
    ) -> None:
        """
        Raises:
            ConnectionError: the client is gone.
        """
        if request.transport is None:
            raise ConnectionResetError("the client is gone")
        self.response, self._writer, self._sender = response, writer, sender
        self._protocol, self._transport = request.protocol, request.transport
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self._streams: dict[int, TokenStream] = {}
        self._frames: Frames = lambda index, token: b""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drainer: asyncio.Task[None] | None = None  # waits for a reader that is slower than its tokens
        self._due = False
        self._rest = b""  # the last frames, which leave together with what ends the response
        self.written = time.monotonic()

    async def relay(self, streams: Sequence[TokenStream], frames: Frames) -> None:
        """Write the frames of every token of the streams as they come, until all have ended. `end` must follow.

        Raises:
            HeadraceError: a stream failed, after all of its tokens.
            ConnectionError: the client is gone.
        """
        self._streams, self._frames = dict(enumerate(streams)), frames
        self._sender.open.add(self)
        for stream in streams:
            stream.on_arrival(self._arrived)
        try:
            await self._over
        finally:
            self._sender.open.discard(self)
            self._streams = {}
            if self._drainer is not None:
                self._drainer.cancel()

    async def end(self, last: bytes = b"") -> web.StreamResponse:
        """Write what is left, the last frames, and the end of the response, at once.

        Raises:
            ConnectionError: the client is gone.
        """
        await self.response.write_eof(self._rest + last)
        return self.response

    def _arrived(self) -> None:
        if not self._due:
            self._due = True
            self._sender.add(self)

    def flush(self, now: float) -> None:
        """Write the frames of all tokens that are there. `now`: time.monotonic()."""
        self._due = False
        if self._over.done() or self._drainer is not None:
            return
        if self._transport.is_closing():
            self._over.set_exception(ConnectionResetError("the client is gone"))
            return
        made: list[bytes] = []
        try:
            self._take(made)
        except Exception as error:  # noqa: BLE001 - the handler's, which waits for it
            self._over.set_exception(error)
        if not self._streams:
            self._rest = b"".join(made)
            self._over.set_result(None)
        elif data := b"".join(made):
            self._write(data, now)

    def _take(self, made: list[bytes]) -> None:
        frames, ended = self._frames, []
        for index, stream in self._streams.items():
            for token in stream.take():
                made.append(frames(index, token))
                if token.end is not None:
                    ended.append(index)
        for index in ended:
            del self._streams[index]

    def _write(self, data: bytes, now: float) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        self.written = now
        if self._protocol.writing_paused:
            self._drainer = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._writer.drain()
        except ConnectionError as error:
            if not self._over.done():
                self._over.set_exception(error)
            return
        self._drainer = None
        self._arrived()

    def ping(self, now: float) -> None:
        """Write a comment, unless there is something on its way anyhow. `now`: time.monotonic()."""
        if self._drainer is None and not self._transport.is_closing():
            self._write(PING, now)


class Sender:
    """Writes all event streams of one router.

    What has arrived is written in the next turn of the event loop; if writing takes longer than tokens take to come, it
    waits as long as it has taken, and more of them leave in one write.
    """

    def __init__(self) -> None:
        self.open: set[EventStream] = set()
        self._due: list[EventStream] = []
        self._free = 0.0  # when it may write again; time.perf_counter()
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, request: web.Request, headers: dict[str, str]) -> EventStream:
        """Send the response headers now, before there is anything to say.

        Raises:
            ConnectionError: the client is gone.
        """
        response = web.StreamResponse(headers={**HEADERS, **headers})
        writer = await response.prepare(request)
        assert writer is not None
        request[STREAM] = response
        if self._sweeper is None:
            self._look_later()
        return EventStream(self, request, response, writer)

    def add(self, stream: EventStream) -> None:
        """Something has arrived for this stream."""
        if not self._due:
            loop, wait = asyncio.get_running_loop(), self._free - time.perf_counter()
            if wait > 0:
                loop.call_later(wait, self._flush)
            else:
                loop.call_soon(self._flush)
        self._due.append(stream)

    def _flush(self) -> None:
        due, self._due = self._due, []
        began, now = time.perf_counter(), time.monotonic()
        for stream in due:
            stream.flush(now)
        ended = time.perf_counter()
        self._free = ended + (ended - began)

    def _look_later(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS / SWEEPS, self._sweep)

    def _sweep(self) -> None:
        """Keep silent streams alive: no proxy on the way may take them for dead."""
        now = time.monotonic()
        for stream in self.open:
            if now - stream.written >= KEEP_ALIVE_SECONDS * (1 - 1 / SWEEPS):
                stream.ping(now)
        self._sweeper = None
        if self.open:
            self._look_later()


SENDER: web.AppKey[Sender] = web.AppKey("sender", Sender)


async def open_stream(request: web.Request, headers: dict[str, str]) -> EventStream:
    """`Sender.start` of the application's sender."""
    return await request.app[SENDER].start(request, headers)
