"""Event streams on real connections: the same bytes as aiohttp's own writer, and what becomes of slow and lost readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from aiohttp import web

from headrace._common.errors import GenerationFailed, HeadraceError
from headrace_router import sse
from headrace_router.streams import TokenStream
from headrace_router.types import End, Token

END = End("length", "", 1, 1, None, 0, 0.0, 0.0)
BIG = "x" * 100_000
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]



def token(text: str, end: End | None = None) -> Token:
    return Token(1, -1.0, text, False, end=end)


def frames(index: int, made: Token) -> bytes:
    if made.text == "slip":
        raise ZeroDivisionError
    return sse.frame(b"%d %b" % (index, made.text.encode())) if made.text else b""


@dataclass
class Site:
    """A server with one streaming route, and the streams of its requests."""

    port: int = 0
    streams: list[TokenStream] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def ours(self, request: web.Request) -> web.StreamResponse:
        """Two token streams, relayed."""
        made = [TokenStream(lambda: None), TokenStream(lambda: None)]
        events, last = await sse.open_stream(request, {"X-Own": "1"}), sse.DONE
        self.streams = made
        self.opened.set()
        try:
            await events.relay(made, frames)
            self.outcomes.append("ended")
        except HeadraceError as error:
            last = sse.frame(str(error).encode())
        except (ConnectionError, ZeroDivisionError, asyncio.CancelledError) as error:
            self.outcomes.append(type(error).__name__)
            raise
        return await events.end(last)

    async def theirs(self, request: web.Request) -> web.StreamResponse:
        """The same frames, written by aiohttp."""
        response = web.StreamResponse(headers={**sse.HEADERS, "X-Own": "1"})
        await response.prepare(request)
        for data in (b"0 a", b"1 b\xc3\xa9", b"0 c"):
            await response.write(sse.frame(data))
        await response.write_eof(sse.frame(b"1 d") + sse.DONE)
        return response

    async def connect(
        self, path: str = "/ours", version: str = "1.1", headers: str = ""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which a request has been sent, once its handler has begun."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"POST {path} HTTP/{version}\r\nHost: x\r\n{headers}Content-Length: 0\r\n\r\n".encode())
        if path == "/ours":
            await self.opened.wait()
            self.opened.clear()
        return reader, writer


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made, app = Site(), web.Application()
    app[sse.SENDER] = sse.Sender()
    app.add_routes([web.post("/ours", made.ours), web.post("/theirs", made.theirs)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


async def turns() -> None:
    """Let the loop write what is due."""
    for _ in range(5):
        await asyncio.sleep(0.001)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def without_date(raw: bytes) -> bytes:
    head, _, body = raw.partition(b"\r\n\r\n")
    return b"\r\n".join(line for line in head.split(b"\r\n") if not line.startswith(b"Date:")) + b"\r\n\r\n" + body


@pytest.mark.parametrize(("version", "headers"), [("1.1", ""), ("1.1", "Connection: close\r\n"), ("1.0", "")])
async def test_the_bytes_are_those_of_aiohttps_own_writer(site: Site, version: str, headers: str) -> None:
    reader, writer = await site.connect("/ours", version, headers)
    for index, text in ((0, "a"), (1, "b\u00e9"), (0, "")):
        site.streams[index].put(token(text))
        await turns()
    site.streams[0].put(token("c", END))
    await turns()
    site.streams[1].put(token("d", END))
    own = await _read_reply(reader)
    writer.close()
    reader, writer = await site.connect("/theirs", version, headers)
    theirs = await _read_reply(reader)
    writer.close()
    assert own.endswith(sse.DONE if version == "1.0" else sse.DONE + b"\r\n0\r\n\r\n")
    assert without_date(own) == without_date(theirs)


async def _read_reply(reader: asyncio.StreamReader) -> bytes:
    """Up to the end of the connection, or of the chunked body."""
    raw = b""
    async with asyncio.timeout(5):
        while not raw.endswith(b"\r\n0\r\n\r\n") and (data := await reader.read(65536)):
            raw += data
    return raw


async def test_a_connection_serves_the_next_request(site: Site) -> None:
    reader, writer = await site.connect()
    for stream in site.streams:
        stream.put(token("a", END))
    assert (await _read_reply(reader)).count(b"data: ") == 3
    writer.write(b"POST /theirs HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    assert (await _read_reply(reader)).count(b"data: ") == 5
    writer.close()


async def test_tokens_of_one_turn_leave_in_one_write_each_as_an_event(site: Site) -> None:
    reader, writer = await site.connect()
    await reader.readuntil(b"\r\n\r\n")
    for text in "abc":
        site.streams[0].put(token(text))
    assert await reader.readuntil(b"\n\n\r\n") == b"21\r\ndata: 0 a\n\ndata: 0 b\n\ndata: 0 c\n\n\r\n"
    writer.close()


async def test_a_failed_stream_ends_after_its_tokens(site: Site) -> None:
    reader, writer = await site.connect()
    site.streams[0].put(token("a"))
    site.streams[0].fail(GenerationFailed("gone"))
    raw = await _read_reply(reader)
    assert raw.index(b"data: 0 a\n\n") < raw.index(b"data: gone\n\n")
    writer.close()


async def test_a_slip_in_a_frame_is_the_handlers(site: Site) -> None:
    reader, writer = await site.connect()
    site.streams[0].put(token("a"))
    site.streams[0].put(token("slip"))
    await until(lambda: site.outcomes == ["ZeroDivisionError"])
    assert b"data: 0 a\n\n" in await reader.read(1000)
    writer.close()


async def test_a_lost_reader_ends_the_relay(site: Site) -> None:
    _, writer = await site.connect()
    writer.close()
    await until(lambda: bool(site.outcomes))
    for stream in site.streams:
        stream.put(token("late"))
    await turns()
    assert site.outcomes in (["CancelledError"], ["ConnectionResetError"])


async def test_a_reader_that_is_lost_while_it_is_waited_for(site: Site) -> None:
    _, writer = await site.connect()
    for _ in range(100):
        site.streams[0].put(token(BIG))
    await turns()
    writer.transport.abort()
    await until(lambda: bool(site.outcomes))
    site.streams[0].put(token("late"))
    await turns()


async def test_a_slow_reader_is_waited_for_and_loses_nothing(site: Site) -> None:
    reader, writer = await site.connect()
    stream, written = site.streams[0], 0
    async with asyncio.timeout(10):
        while not stream.take():  # nothing waits until the connection is full
            stream.put(token(BIG))
            written += 1
            await turns()
    stream.put(token("z", END))
    site.streams[1].put(token("z", END))
    await turns()
    assert not site.outcomes
    raw = await _read_reply(reader)
    assert raw.count(b"data: 0 x") == written - 1
    assert raw.endswith(b"data: 0 z\n\ndata: 1 z\n\n" + sse.DONE + b"\r\n0\r\n\r\n")
    writer.close()


async def test_silent_streams_get_comments_and_others_do_not(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.3)
    silent_reader, silent_writer = await site.connect()
    silent = site.streams
    reader, writer = await site.connect()
    for _ in range(40):
        site.streams[0].put(token("a"))
        await asyncio.sleep(0.02)
    for stream in (*silent, *site.streams):
        stream.put(token("", END))
    assert 1 <= (await _read_reply(silent_reader)).count(b"\r\n: ping\n\r\n") <= 4
    assert b": ping" not in await _read_reply(reader)
    for made in (silent_writer, writer):
        made.close()


async def test_the_sweep_ends_with_the_streams(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.1)
    _, writer = await site.connect()
    writer.close()
    await until(lambda: bool(site.outcomes))
    await asyncio.sleep(0.05)
    assert not [handle for handle in _timers() if "_sweep" in repr(handle)]


def _timers() -> list[object]:
    scheduled: list[object] = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return scheduled


@pytest.mark.parametrize("text", [
    "plain", "quote \" back \\ slash", "\u00e9\U0001f600", "a\u2028b\u2029c\u0085d", "\x00", "\n\r\t",
])
def test_a_frame_of_a_text_is_the_frame_of_its_json(text: str) -> None:
    def data(text: str) -> bytes:
        return msgspec.json.encode({"a": "\u2028", "text": text, "z": 1})

    made = sse.FrameOfText(data)(text)
    assert made == sse.frame(data(text))
    assert len(made.decode().splitlines()) == 2


def test_an_id_is_that_of_the_last_event_of_a_token() -> None:
    one, two = sse.frame(b'{"a":1}'), sse.frame(b'{"b":2}', "named")
    assert sse.with_id(one, "1-5") == b'id: 1-5\ndata: {"a":1}\n\n'
    assert sse.with_id(one + two, "1-5") == one + b"id: 1-5\n" + two
    assert sse.with_id(b"", "1-5") == b""
