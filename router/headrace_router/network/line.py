"""The gateway's end of one worker's WebSocket: frames in and out, both bounded.

One task reads into the inbox, one task writes from the outbox, and nobody waits for either: a worker that sends faster than
its frames can be kept, or does not take what is for it, is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from aiohttp import WSMsgType, web
from msgspec import Struct

from headrace_router.network.frames import Codec, Malformed

log = logging.getLogger(__name__)

INBOX = 8192  # frames
INBOX_BYTES = 16 << 20
OUTBOX = 1024  # frames
WRITE_SECONDS = 10.0  # for one frame
CLOSE_SECONDS = 5.0  # for the closing handshake, after which the socket is cut
MALFORMED = 3  # frames, until the connection is closed


class Line:
    """One worker's connection. `ended` says why it has ended."""

    def __init__(self, name: str, socket: web.WebSocketResponse, codec: Codec, abort: Callable[[], None]) -> None:
        """`name`: for the log; `abort`: cuts the socket."""
        self._name, self._socket, self._codec, self._abort = name, socket, codec, abort
        self._inbox: asyncio.Queue[tuple[Struct, int] | None] = asyncio.Queue()
        self._outbox: asyncio.Queue[Struct] = asyncio.Queue(OUTBOX)
        self._closing: asyncio.Task[None] | None = None
        self.unread = 0  # bytes in the inbox
        self.unknown = self.malformed = 0  # frames
        self.ended = "the connection was closed"

    @property
    def closing(self) -> bool:
        """This side has closed it."""
        return self._closing is not None

    def send(self, frame: Struct) -> None:
        """Queue a frame; a worker that does not take them is cut off."""
        try:
            self._outbox.put_nowait(frame)
        except asyncio.QueueFull:
            self.close(4408, "too many frames wait for you")

    def close(self, code: int, reason: str) -> None:
        """End the connection, whatever the other end does."""
        if self._closing is None:
            self.ended = reason
            self._closing = asyncio.create_task(self._close(code, reason))
            self._inbox.put_nowait(None)

    async def _close(self, code: int, reason: str) -> None:
        log.info("worker %s: closed with %d: %s", self._name, code, reason)
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.close(code=code, message=reason.encode()[:120])
        except TimeoutError:
            self._abort()

    async def closed(self) -> None:
        """Wait until a closing that has begun is over."""
        if self._closing is not None:
            await asyncio.wait([self._closing])

    async def write(self) -> None:
        """Write frames until the connection ends."""
        while True:
            data = self._codec.encode(await self._outbox.get())
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await (self._socket.send_str(data.decode()) if self._codec.is_text else self._socket.send_bytes(data))
            except (TimeoutError, ConnectionError):
                self.close(4408, "you do not read")
                return

    async def read(self) -> None:
        """Read frames into the inbox until the connection ends."""
        async for message in self._socket:
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                self.ended = "the connection failed"
                break
            try:
                frame = self._codec.decode(message.data)
            except Malformed as error:
                self.complain(error)
                continue
            if frame is None:
                self.unknown += 1
                continue
            size = len(message.data)
            self.unread += size
            if self._inbox.qsize() >= INBOX or self.unread > INBOX_BYTES:
                self.close(4408, "you send faster than it can be kept")
                return
            self._inbox.put_nowait((frame, size))
        self._inbox.put_nowait(None)

    async def frames(self) -> AsyncIterator[Struct]:
        """What the worker has sent, in order, to the end of the connection."""
        while (entry := await self._inbox.get()) is not None and not self.closing:
            self.unread -= entry[1]
            yield entry[0]

    def complain(self, error: Malformed) -> None:
        """A frame is none, or says what cannot be; the third one ends the connection."""
        self.malformed += 1
        log.warning("worker %s: malformed frame: %s", self._name, error)
        if self.malformed >= MALFORMED:
            self.close(4400, "malformed frames")
