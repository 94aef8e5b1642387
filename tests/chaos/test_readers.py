"""Readers of one request, however many, slow or restless: each gets every event once, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import random
import socket
from statistics import fmean as mean
from urllib.parse import urlsplit

import pytest

from tests.chaos.streams import Client, Heard

TOKENS = 600


async def restless(client: Client, job: str) -> Heard:
    """Leaves after a few events and comes back for what follows the last one, to the end."""
    draw, heard = random.Random(5), Heard()
    while not heard.events or heard.events[-1]["kind"] != "done":
        stay = draw.randrange(1, 40)
        events = client.events(job, heard.logged[-1]["event_id"] if heard.logged else None)
        async for event in events:
            heard.hear(event)
            stay -= 1
            if not stay:
                break
        await events.aclose()  # type: ignore[attr-defined]
    return heard


async def test_all_readers_of_a_request_hear_the_same(client: Client) -> None:
    job = await client.ask("Two tabs", TOKENS)
    one, other, third = await asyncio.gather(client.follow(job), client.follow(job), restless(client, job))
    late = await client.follow(job)
    one.check()
    for heard in (other, third, late):
        assert heard.logged == one.logged


def trickle(url: str, job: str) -> socket.socket:
    """A connection to a request's events whose end reads with small buffers, or not at all."""
    address = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect((address.hostname, address.port))
    connection.sendall(f"GET /v1/requests/{job}/events HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
    return connection


@pytest.mark.chaos
async def test_a_reader_of_ten_bytes_a_second_slows_nobody(client: Client) -> None:
    """Others' gaps are what they were; and what the slow one has not read is there when it comes again."""
    crowd, length = 8, 1500
    calm = await client.ask_all(crowd, length)
    job = await client.ask("Slow reader", 4000)
    connection = trickle(client.url, job)
    read = 0

    async def slowly() -> None:
        nonlocal read
        while True:
            read += len(await asyncio.to_thread(connection.recv, 10))
            await asyncio.sleep(1)

    reader = asyncio.create_task(slowly())
    slowed = await client.ask_all(crowd, length)
    reader.cancel()
    before, after = (mean(gap for heard in group for gap in heard.gaps) for group in (calm, slowed))
    print(f"\nmean gap {before * 1e3:.2f} ms; beside a reader that has read {read} bytes {after * 1e3:.2f} ms")
    assert read < 200
    assert after < 2 * before
    connection.close()
    for one, other in zip(calm, slowed, strict=True):
        other.check()
        assert other.ids == one.ids
    whole = await client.follow(job)
    whole.check()
    assert len(whole.ids) > length
