"""The queue of one request, and several read as one."""

from __future__ import annotations

import asyncio

import pytest

from headrace._common.errors import GenerationFailed
from headrace_router.merge import merge
from headrace_router.streams import TokenStream
from headrace_router.types import End, Token

END = End("length", "ab", 2, 1, None, 0, 0.0, 0.0)


def token(number: int, end: End | None = None) -> Token:
    return Token(number, -1.0, "x", False, end=end)


async def test_tokens_in_order_up_to_the_end() -> None:
    stream = TokenStream(lambda: None)
    for number in range(3):
        stream.put(token(number))
    asyncio.get_running_loop().call_later(0.01, stream.put, token(3, END))
    assert [t.id async for t in stream] == [0, 1, 2, 3]


async def test_what_arrives_is_told_once_until_it_is_taken() -> None:
    stream, told = TokenStream(lambda: None), []
    stream.put(token(0))
    stream.on_arrival(lambda: told.append(len(stream.take())))
    assert told == [1]
    stream.on_arrival(lambda: told.append(0))
    for number in range(1, 4):
        stream.put(token(number))
    assert told == [1, 0]
    assert [t.id for t in stream.take()] == [1, 2, 3]
    stream.put(token(4, END))
    assert told == [1, 0, 0]


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    stream = TokenStream(lambda: None)
    stream.put(token(1))
    stream.fail(GenerationFailed("gone"))
    assert len(await stream.read()) == 1
    with pytest.raises(GenerationFailed, match="gone"):
        await stream.read()


async def test_leaving_cancels_once_and_only_what_runs() -> None:
    cancelled: list[int] = []
    async with TokenStream(lambda: cancelled.append(1)) as stream:
        stream.put(token(1))
    stream.close()
    assert cancelled == [1]
    async with TokenStream(lambda: cancelled.append(2)) as stream:
        stream.put(token(1, END))
    assert cancelled == [1]


async def test_merge_reads_all_to_their_ends() -> None:
    streams = [TokenStream(lambda: None) for _ in range(3)]
    streams[0].put(token(0, END))

    async def write() -> None:
        for number in range(5):
            for stream in streams[1:]:
                stream.put(token(number, END if number == 4 else None))
            await asyncio.sleep(0)

    writer = asyncio.create_task(write())
    got = [pair async for pairs in merge(streams) for pair in pairs]
    await writer
    for index, stream_ids in enumerate(([0], list(range(5)), list(range(5)))):
        assert [t.id for i, t in got if i == index] == stream_ids


async def test_merge_passes_errors_on() -> None:
    stream = TokenStream(lambda: None)
    reader = merge([stream])
    stream.put(token(1))
    stream.fail(GenerationFailed("gone"))
    assert [t.id for _, t in await anext(reader)] == [1]
    with pytest.raises(GenerationFailed):
        await anext(reader)
