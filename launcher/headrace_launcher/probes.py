"""Questions to running children: are they ready, do they still answer?"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from headrace_launcher import sockets

POLL_SECONDS = 0.1  # between looks at a starting process


class ShardProbe:
    """Asks one rank for its Health, over one channel."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stub: Any = None

    async def healthy(self, seconds: float) -> bool | None:
        """Whether the rank says that it is well; None if it says nothing within so many seconds."""
        import grpc.aio  # here, so that it loads while the shards do

        from headrace.v1 import generation_pb2, generation_pb2_grpc

        if self._stub is None:
            self._stub = generation_pb2_grpc.GenerationStub(grpc.aio.insecure_channel(f"unix:{self._path}"))
        try:
            await self._stub.Health(generation_pb2.HealthRequest(), timeout=seconds, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return None if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else False
        return True

    async def wait(self) -> None:
        """Wait until the rank is well. One that cannot load ends by itself, which the caller sees."""
        while not self._path.is_socket():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(POLL_SECONDS)
        while not await self.healthy(5.0):  # noqa: ASYNC110 - another process answers
            await asyncio.sleep(POLL_SECONDS)


async def http_healthy(host: str, port: int) -> None:
    """Wait until GET /health answers 200."""
    while await http_health(host, port, 5.0) is not True:  # noqa: ASYNC110 - another process answers
        await asyncio.sleep(POLL_SECONDS)


async def http_health(host: str, port: int, seconds: float) -> bool | None:
    """Whether GET /health answers 200; None if nothing answers within so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            try:
                reader, writer = await asyncio.open_connection(sockets.reachable(host), port)
            except OSError:
                return False
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status = (await reader.readline()).split()
                return len(status) > 1 and status[1] == b"200"
            except OSError:
                return False
            finally:
                writer.close()
    return None
