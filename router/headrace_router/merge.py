"""Several token streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from headrace._common.errors import HeadraceError
from headrace_router.streams import TokenStream
from headrace_router.types import Token


async def merge(streams: Sequence[TokenStream]) -> AsyncIterator[list[tuple[int, Token]]]:
    """(index of the stream, token), a list of all that are there at a time.

    Raises:
        HeadraceError: one of the streams failed.
    """
    arrived = asyncio.Event()
    for stream in streams:
        stream.on_arrival(arrived.set)
    open_streams = dict(enumerate(streams))
    while open_streams:
        await arrived.wait()
        arrived.clear()
        tokens, failed = _take(open_streams)
        if tokens:
            yield tokens
        if failed is not None:
            raise failed


def _take(streams: dict[int, TokenStream]) -> tuple[list[tuple[int, Token]], HeadraceError | None]:
    """All tokens that are there, and the first error; streams that have ended are dropped."""
    tokens, failed = [], None
    for index, stream in list(streams.items()):
        try:
            taken = stream.take()
        except HeadraceError as error:
            failed = failed or error
            continue
        for token in taken:
            tokens.append((index, token))
            if token.end is not None:
                del streams[index]
    return tokens, failed
