"""Several token streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from headrace_router.streams import TokenStream
from headrace_router.types import Token


async def merge(streams: Sequence[TokenStream], silence: float | None) -> AsyncIterator[list[tuple[int, Token]]]:
    """(index of the stream, token), a list of all that are there at a time; [] after `silence` seconds without any.

    Raises:
        HeadraceError: one of the streams failed.
    """
    arrived = asyncio.Event()
    for stream in streams:
        stream.on_arrival(arrived.set)
    open_streams = dict(enumerate(streams))
    loop = asyncio.get_running_loop()
    while open_streams:
        timer = None if silence is None else loop.call_later(silence, arrived.set)
        try:
            await arrived.wait()
        finally:
            if timer is not None:
                timer.cancel()
        arrived.clear()
        tokens = []
        for index, stream in list(open_streams.items()):
            for token in stream.take():
                tokens.append((index, token))
                if token.end is not None:
                    del open_streams[index]
        yield tokens
