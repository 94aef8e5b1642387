"""Clients that send slowly, wrongly or too much, and clients that do not read, on bare sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.fakes.routers import Running, running, until
from tests.fakes.scripted_shard import ScriptedShard
from tests.fakes.text_models import write_text_model

TIMEOUT = 0.4  # seconds
HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    write_text_model(tmp_path)
    shard = ScriptedShard(max_total_tokens=200_000)
    async with running(tmp_path, shard, client_timeout=TIMEOUT) as made:
        yield made
        await made.settled()


class Client:
    """A connection on which anything may be sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, server: Running) -> Client:
        host, port = server.url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """(status, headers, JSON) of the next answer."""
        async with asyncio.timeout(5):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            return int(first.split()[1]), headers, json.loads(await self.reader.readexactly(int(headers["content-length"])))

    async def ended(self) -> bytes:
        """What comes until the server closes the connection."""
        async with asyncio.timeout(5):
            return await self.reader.read()


async def test_a_head_that_never_ends(server: Running) -> None:
    client = await Client.connect(server)
    for piece in (b"POST /gen", b"erate HTTP/1.1\r\nHost", b": x\r\n"):
        await client.send(piece)
        await asyncio.sleep(0.05)
    status, headers, said = await client.answer()
    assert (status, said["error_type"], headers["connection"]) == (408, "timeout", "close")
    assert await client.ended() == b""


async def test_a_trickle_does_not_extend_the_time_of_a_head(server: Running) -> None:
    client = await Client.connect(server)

    async def trickle() -> None:
        for byte in HEAD + b"X-Padding: " + b"a" * 1000:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(trickle())
    assert (await client.answer())[0] == 408
    task.cancel()


async def test_a_connection_without_a_request_is_closed(server: Running) -> None:
    client = await Client.connect(server)
    assert await client.ended() == b""


async def test_the_head_of_a_second_request_has_its_own_time(server: Running) -> None:
    client = await Client.connect(server)
    get = b"GET /info HTTP/1.1\r\nHost: x\r\n\r\n"
    await client.send(get)
    assert (await client.answer())[0] == 200
    await asyncio.sleep(1.5 * TIMEOUT)  # a connection may be kept for later
    await client.send(get)
    assert (await client.answer())[0] == 200
    await client.send(get[:10])
    assert (await client.answer())[0] == 408
    assert await client.ended() == b""


async def test_a_body_that_never_ends(server: Running) -> None:
    for path in (b"/generate", b"/v1/completions"):
        client = await Client.connect(server)
        await client.send(HEAD.replace(b"/generate", path) + b'Content-Length: 500\r\n\r\n{"inputs"')
        status, headers, said = await client.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert "9 bytes came" in str(said)
        assert server.router.service.active == 0
        await client.ended()


async def test_a_body_in_a_trickle(server: Running) -> None:
    client = await Client.connect(server)
    await client.send(HEAD + b"Content-Length: 100000\r\n\r\n")

    async def trickle() -> None:
        while True:
            client.writer.write(b" ")
            await asyncio.sleep(0.02)

    task = asyncio.create_task(trickle())
    assert (await client.answer())[0] == 408
    task.cancel()


async def test_a_body_that_takes_long_because_it_is_large(server: Running) -> None:
    body = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 1}, "padding": "y" * 4000}).encode()
    client = await Client.connect(server)
    await client.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
    for at in range(0, len(body), 500):
        await client.send(body[at : at + 500])
        await asyncio.sleep(0.15)  # in all three times the timeout
    status, _, said = await client.answer()
    assert (status, list(said)) == (200, ["generated_text"])


@pytest.mark.parametrize(("data", "status"), [
    (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    (b"GET / HTTP/1.1\r\nHost: x\r\nX-A: " + b"zq7secret" * 1000 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"zq7secret" * 1000 + b": a\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(200)) + b"\r\n", 431),
    (b"zq7secret\r\n\r\n", 400), (b"\x16\x03\x01\x02\x00\x01", 400), (b"GET / HTTP/1.1\r\n\r\n", 400),
    (HEAD + b"Content-Length: zq7secret\r\n\r\n", 400),
    (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzq7secret\r\n", 400),
    (HEAD + b"Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 400),
    (HEAD + b"Content-Length: 3000000\r\n\r\n", 413),
])
async def test_what_is_no_request_is_refused_as_json(
    server: Running, caplog: pytest.LogCaptureFixture, data: bytes, status: int
) -> None:
    client = await Client.connect(server)
    await client.send(data)
    got, headers, said = await client.answer()
    assert (got, headers["content-type"]) == (status, "application/json")
    assert set(said) == {"error", "error_type"}
    assert headers["x-request-id"]
    assert "zq7secret" not in str(said) + caplog.text
    client.writer.close()
    assert (await server.generate()).status == 200


async def test_a_client_that_leaves_in_its_body(server: Running) -> None:
    client = await Client.connect(server)
    await client.send(HEAD + b'Content-Length: 500\r\n\r\n{"inputs"')
    await until(lambda: server.router.service.metrics.request_count == 1)
    client.writer.close()
    await until(lambda: server.router.service.metrics.request_failure["dropped"] == 1)


def connections(server: Running) -> list[web.RequestHandler]:
    """Of all clients that are connected."""
    assert server.router._runner.server is not None
    return server.router._runner.server.connections


@contextlib.asynccontextmanager
async def small_reader(server: Running) -> AsyncIterator[socket.socket]:
    """A stream on a socket that takes little and is not read, with little room in the kernel: buffers fill soon."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 150_000}}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1000)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        await until(lambda: len(connections(server)) == 1)
        transport = connections(server)[0].transport
        assert transport is not None
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        head = HEAD.replace(b"/generate", b"/generate_stream") + b"Content-Length: %d\r\n\r\n" % len(body)
        await asyncio.get_running_loop().sock_sendall(client, head + body)
        await until(lambda: server.router.batcher.running == 1)
        yield client


async def test_a_reader_that_stops_is_cut_off_and_disturbs_nobody(server: Running) -> None:
    async with small_reader(server):
        replies = await asyncio.gather(*(server.generate(str(i), 20) for i in range(4)))
        assert [reply.status for reply in replies] == [200] * 4
        await server.settled(10)
        assert server.router.service.metrics.request_failure["dropped"] == 1


async def test_a_slow_reader_is_not_cut_off(server: Running) -> None:
    loop = asyncio.get_running_loop()
    async with small_reader(server) as client:
        begun = loop.time()
        while loop.time() - begun < 4 * TIMEOUT:
            await loop.sock_recv(client, 2000)
            await asyncio.sleep(0.05)
        assert connections(server)[0].writing_paused
        assert server.router.service.active == 1
    await server.settled(10)
