"""Many streams read as raw bytes: a client that costs so little that the server beside it can be measured.

It tells the writes of the server apart: each is a chunk of the chunked transfer coding (RFC 9112, section 7.1).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

CONNECTS_AT_ONCE = 200
DATA = b"data: "


@dataclass(frozen=True)
class Stream:
    """One answer. `chunks`: the body as the server wrote it."""

    status: int
    chunks: list[bytes]

    @property
    def events(self) -> int:
        """Frames with data."""
        return sum(chunk.count(DATA) for chunk in self.chunks)


def read_stream(raw: bytes) -> Stream:
    """An HTTP/1.1 answer in the chunked coding, or without one if it is no stream.

    Raises:
        ValueError: it is cut off.
    """
    head, blank, body = raw.partition(b"\r\n\r\n")
    if not blank:
        raise ValueError("no headers")
    status = int(head.split(b" ", 2)[1])
    if b"transfer-encoding: chunked" not in head.lower():
        return Stream(status, [body])
    chunks: list[bytes] = []
    while True:
        size_line, line_end, rest = body.partition(b"\r\n")
        size = int(size_line, 16) if line_end else 0
        if not line_end or rest[size : size + 2] != b"\r\n":
            raise ValueError("the stream is cut off")
        if not size:
            return Stream(status, chunks)
        chunks.append(rest[:size])
        body = rest[size + 2 :]


class _Client(asyncio.Protocol):
    """Sends one request, and collects what comes until the server closes."""

    def __init__(self, request: bytes, crowd: Crowd) -> None:
        self._request, self._crowd = request, crowd
        self._begun = False
        self.raw: list[bytes] = []
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.raw.append(data)
        if events := data.count(DATA):
            self._crowd.events += events
            if not self._begun:
                self._begun = True
                self._crowd.one_begins()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.one_ends()
        self.done.set_result(None)


class Crowd:
    """Streams that run side by side: all of them do between `all_begun` and `one_ended`."""

    def __init__(self, count: int) -> None:
        self.events = 0  # that have come, of all streams
        self._count = self._to_begin = count
        self.all_begun, self.one_ended = asyncio.Event(), asyncio.Event()

    def one_begins(self) -> None:
        self._to_begin -= 1
        if not self._to_begin:
            self.all_begun.set()

    def one_ends(self) -> None:
        self.one_ended.set()

    async def post(self, host: str, port: int, path: str, body: bytes) -> list[Stream]:
        """Send the same body on a connection for each stream, and read all to their ends.

        Raises:
            OSError: a connection is refused.
            ValueError: an answer is cut off.
        """
        request = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(CONNECTS_AT_ONCE)

        async def one() -> _Client:
            async with room:
                _, client = await loop.create_connection(lambda: _Client(request, self), host, port)
            await client.done
            return client

        clients = await asyncio.gather(*(one() for _ in range(self._count)))
        return [read_stream(b"".join(client.raw)) for client in clients]
