"""A worker's end of the connection: jobs from a gateway into this router's own engine, and their tokens back.

Tokens that arrive together leave as one frame. A lost connection is made again, with growing pauses; the gateway has given
the jobs to others by then, so they are stopped here. A gateway that refuses this worker ends it: trying again would not help.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import aiohttp
from msgspec import Struct

import headrace
from headrace._common.errors import HeadraceError, InvalidRequest, StartupError
from headrace_router.engine import Engine
from headrace_router.network import frames
from headrace_router.network.frames import PATH, PROTOCOLS, Codec, JobFrame, Malformed, Row
from headrace_router.network.wire import to_request
from headrace_router.streams import TokenStream
from headrace_router.types import Token, TopToken

log = logging.getLogger(__name__)

PAUSES = (0.5, 30.0)  # seconds before the connection is made again: the first, and the longest
CONNECT_SECONDS = 10.0
LARGEST_FRAME = 64 << 20  # bytes, from the gateway
STATUS_SECONDS = 2.5
REFUSALS = (400, 401, 403, 404, 426)
FINISHES = {"eos_token": "eos", "length": "length", "stop_sequence": "stop"}


class _Run:
    """One job that runs here."""

    __slots__ = ("attempt", "index", "job", "stream")

    def __init__(self, frame: JobFrame, stream: TokenStream) -> None:
        self.job, self.attempt, self.index, self.stream = frame.job, frame.attempt, frame.rng_offset, stream


class Connection:
    """What lives as long as one WebSocket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, codec: Codec, engine: Engine) -> None:
        self._socket, self._codec, self._engine = socket, codec, engine
        self._runs: dict[str, _Run] = {}
        self._due: set[str] = set()
        self._outbox: asyncio.Queue[Struct] = asyncio.Queue()  # as long as what runs has to say
        self.welcome: frames.Welcome | None = None
        self.draining = False

    def send(self, frame: Struct) -> None:
        self._outbox.put_nowait(frame)

    async def write(self) -> None:
        """Write frames until the connection ends."""
        while True:
            await self.write_now(await self._outbox.get())

    async def write_now(self, frame: Struct) -> None:
        """
        Raises:
            ConnectionError: the gateway is gone.
        """
        data = self._codec.encode(frame)
        await (self._socket.send_str(data.decode()) if self._codec.is_text else self._socket.send_bytes(data))

    async def report(self) -> None:
        """Tell what runs, again and again."""
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            self.send(frames.Status([(run.job, run.attempt, run.index) for run in self._runs.values()]))

    async def read(self) -> None:
        """Act on frames until the connection ends.

        Raises:
            StartupError: the gateway does not want this worker.
        """
        async for message in self._socket:
            if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                return
            try:
                frame = self._codec.decode(message.data)
            except Malformed as error:
                log.warning("malformed frame from the gateway: %s", error)
                continue
            match frame:
                case frames.Welcome():
                    self.welcome = frame
                    log.info("working for gateway %s as %s, %d slots", frame.gateway, frame.session, frame.slots)
                case JobFrame():
                    self._start(frame)
                case frames.Cancel():
                    self._stop(frame.job, frame.attempt)
                case frames.Ping():
                    self.send(frames.Pong(frame.n))
                case frames.Drain():
                    self.draining = True
                case frames.Refusal():
                    raise StartupError(f"the gateway refuses this worker: {frame.message}")

    def _start(self, frame: JobFrame) -> None:
        if frame.job in self._runs or self.draining:
            self.send(frames.Nack(frame.job, frame.attempt))
            return
        try:
            stream = self._engine.submit(to_request(frame))
        except HeadraceError as error:
            self.send(_failure(frame.job, frame.attempt, error))
            return
        self._runs[frame.job] = _Run(frame, stream)
        self.send(frames.Accept(frame.job, frame.attempt))
        stream.on_arrival(lambda: self._arrived(frame.job))

    def _stop(self, job: str, attempt: int) -> None:
        run = self._runs.get(job)
        if run is not None and run.attempt == attempt:
            del self._runs[job]
            run.stream.close()
            self.send(frames.Done(job, attempt, "cancelled"))

    def stop_all(self) -> None:
        """Stop what runs: it is somebody else's now."""
        runs = list(self._runs.values())
        self._runs.clear()
        for run in runs:
            run.stream.close()

    def _arrived(self, job: str) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.add(job)

    def _flush(self) -> None:
        """One frame for all tokens that have arrived."""
        due, self._due = self._due, set()
        rows: list[Row] = []
        after: list[Struct] = []
        for job in due:
            if (run := self._runs.get(job)) is not None and (last := self._take(run, rows)) is not None:
                after.append(last)
                del self._runs[job]
                run.stream.close()
        if rows:
            self.send(frames.Step(rows))
        for frame in after:
            self.send(frame)

    def _take(self, run: _Run, rows: list[Row]) -> Struct | None:
        """A run's new tokens into rows; its last frame if it has ended."""
        try:
            tokens = run.stream.take()
        except HeadraceError as error:
            return _failure(run.job, run.attempt, error)
        for token in tokens:
            if token.prompt is not None:
                told = [(p.id, p.logprob, _pairs(p.top) if p.top is not None else None) for p in token.prompt]
                self.send(frames.PromptTokens(run.job, run.attempt, told))
            rows.append(_row(run, token))
            run.index += 1
            if token.end is not None:
                return frames.Done(run.job, run.attempt, FINISHES[token.end.finish_reason])
        return None


def _row(run: _Run, token: Token) -> Row:
    return run.job, run.attempt, run.index, token.id, token.logprob, 0, _pairs(token.top or [])


def _pairs(top: list[TopToken]) -> list[tuple[int, float]]:
    return [(entry.id, entry.logprob) for entry in top]


def _failure(job: str, attempt: int, error: HeadraceError) -> frames.Fail:
    wrong = isinstance(error, InvalidRequest)
    return frames.Fail(job, attempt, "bad_request" if wrong else "internal", not wrong, str(error)[:500])


class Agent:
    """Keeps a connection to a gateway for as long as this worker lives."""

    def __init__(
        self, url: str, token: str, model: frames.Model, slots: int, engine: Engine,
        rest: Callable[[float], float] = lambda pause: random.uniform(pause / 2, pause),
    ) -> None:
        """`url`: of the gateway, ws or wss; `rest`: seconds to wait in place of so many."""
        self._url, self._token, self._model, self._slots = url.rstrip("/") + PATH, token, model, slots
        self._engine, self._rest = engine, rest
        self._connection: Connection | None = None
        self._leaving = False

    async def run(self) -> None:
        """Connect, work, connect again; never returns.

        Raises:
            StartupError: the gateway refuses this worker.
        """
        pause = PAUSES[0]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)) as client:
            while not self._leaving:
                began = time.monotonic()
                try:
                    await self._connect(client)
                    log.warning("the connection to the gateway was lost")
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in REFUSALS:
                        raise StartupError(f"the gateway {self._url} refuses this worker: {_why(error.status)}") from None
                    log.warning("the gateway answers %d", error.status)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    log.warning("the gateway cannot be reached: %s", error or type(error).__name__)
                pause = PAUSES[0] if time.monotonic() - began > PAUSES[1] else min(pause * 2, PAUSES[1])
                await asyncio.sleep(self._rest(pause))
        await asyncio.Event().wait()  # what is local goes on to its end

    async def _connect(self, client: aiohttp.ClientSession) -> None:
        headers = {"Authorization": f"Bearer {self._token}"}
        async with client.ws_connect(
            self._url, headers=headers, protocols=PROTOCOLS, heartbeat=frames.HEARTBEAT, max_msg_size=LARGEST_FRAME
        ) as socket:
            connection = Connection(socket, Codec(socket.protocol or PROTOCOLS[-1], frames.FromGateway), self._engine)
            await connection.write_now(frames.Hello([self._model], self._slots, f"headrace/{headrace.__version__}"))
            self._connection = connection
            tasks = [asyncio.create_task(connection.write()), asyncio.create_task(connection.report())]
            try:
                await connection.read()
            finally:
                self._connection = None
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                connection.stop_all()

    async def leave(self) -> None:
        """Say good-bye, for good: what runs here goes on elsewhere, at once."""
        self._leaving = True
        if self._connection is not None:
            try:
                await self._connection.write_now(frames.Bye("the worker stops"))
            except ConnectionError as error:
                log.debug("no good-bye: %s", error)


def _why(status: int) -> str:
    return {
        401: "its token is not known", 403: "its token is not known", 404: "no gateway is there",
        426: f"it speaks none of {', '.join(PROTOCOLS)}",
    }.get(status, f"status {status}")
