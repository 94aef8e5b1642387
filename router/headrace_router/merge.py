"""Several token streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from headrace._common.errors import HeadraceError
from headrace_router.streams import Silence, TokenStream
from headrace_router.types import Token


async def merge(streams: Sequence[TokenStream], silence: float | None) -> AsyncIterator[list[tuple[int, Token]]]:
    """(index of the stream, token), a list of all that are there at a time; [] after `silence` seconds without any.

    Raises:
        HeadraceError: one of the streams failed.
    """
    arrived, quiet = asyncio.Event(), Silence()
    for stream in streams:
        stream.on_arrival(arrived.set)
    open_streams = dict(enumerate(streams))
    try:
        while open_streams:
            if silence is not None:
                quiet.watch(arrived.set, silence)
            await arrived.wait()
            quiet.look_away()
            arrived.clear()
            tokens, failed = _take(open_streams)
            if tokens or failed is None:
                yield tokens
            if failed is not None:
                raise failed
    finally:
        quiet.close()


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
