"""A worker's end of the connection: jobs from a gateway into this router's own engine or another server, and their tokens back.

Tokens that arrive together leave as one frame. A lost connection is made again, with growing pauses; the gateway has given
the jobs to others by then, so they are stopped here. A gateway that refuses this worker ends it: trying again would not help.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from msgspec import Struct

import headrace
from headrace._common.errors import HeadraceError, InvalidRequest, Overloaded, StartupError
from headrace._common.logs import Origin, about
from headrace_router.network import frames
from headrace_router.network.frames import PATH, PROTOCOLS, TEXT, Begun, Codec, JobFrame, Malformed, Row, TextRow
from headrace_router.network.lender import Lender
from headrace_router.streams import TokenStream
from headrace_router.types import Token, TopToken

log = logging.getLogger(__name__)

PAUSES = (0.5, 30.0)  # seconds before the connection is made again: the first, and the longest
CONNECT_SECONDS = 10.0
LARGEST_FRAME = 64 << 20  # bytes, from the gateway
STATUS_SECONDS = 2.5
OFFER_SECONDS = 1.0  # between looks at what the machine can take
BYE_SECONDS = 2.0
REFUSALS = {
    400: "it is no gateway", 401: "its token is not known", 403: "its token may not work here", 404: "no gateway is there",
    426: f"it speaks none of {', '.join(PROTOCOLS)}",
}
FINAL = (4401, 4403, 4409)  # close codes after which coming back would not help
FINISHES = {"eos_token": "eos", "length": "length", "stop_sequence": "stop"}


Source = Callable[[JobFrame], TokenStream]  # runs a job; raises HeadraceError if it cannot


@dataclass(slots=True)
class Tally:
    """What a worker has done since it began."""

    done: int = 0
    tokens: int = 0


class _Run:
    """One job that runs here. `index`: of the next token, or row of text; `begun`: a token has come."""

    __slots__ = ("attempt", "begun", "index", "job", "origin", "stream")

    def __init__(self, frame: JobFrame, stream: TokenStream, origin: Origin) -> None:
        self.job, self.attempt, self.index, self.stream = frame.job, frame.attempt, frame.rng_offset, stream
        self.origin, self.begun = origin, False


class Connection:
    """What lives as long as one WebSocket."""

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, codec: Codec, source: Source, speaks_text: bool, lender: Lender,
        tally: Tally,
    ) -> None:
        self._socket, self._codec, self._source, self._speaks_text = socket, codec, source, speaks_text
        self._lender, self._tally = lender, tally
        self._offered = lender.capacity
        self._runs: dict[str, _Run] = {}
        self._due: set[str] = set()
        self._outbox: asyncio.Queue[Struct] = asyncio.Queue()  # as long as what runs has to say
        self.welcome: frames.Welcome | None = None
        self.draining = False

    @property
    def running(self) -> int:
        """Jobs."""
        return len(self._runs)

    def hello(self, model: frames.Model) -> frames.Hello:
        """The first frame."""
        return frames.Hello([model], self._lender.slots, f"headrace/{headrace.__version__}", capacity=self._offered)

    def send(self, frame: Struct) -> None:
        self._outbox.put_nowait(frame)

    def offer(self) -> None:
        """Tell how many jobs are taken from now on, if that has changed."""
        if (capacity := self._lender.capacity) != self._offered:
            self._offered = capacity
            log.info("taking %d jobs at once%s", capacity, f": {self._lender.reason}" if capacity == 0 else "")
            self.send(frames.Capacity(capacity))

    async def look(self) -> None:
        """Offer what the machine can take, again and again."""
        while True:
            await asyncio.sleep(OFFER_SECONDS)
            self.offer()

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
            running = [(run.job, run.attempt, run.index) for run in self._runs.values()]
            free = max(self._lender.capacity - len(running), 0)
            self.send(frames.Status(running, free, self._lender.free_tokens()))

    async def read(self) -> str:
        """Act on frames until the connection ends; says why it did.

        Raises:
            StartupError: the gateway does not want this worker, now or later.
        """
        while True:
            message = await self._socket.receive()
            if message.type is aiohttp.WSMsgType.CLOSE:
                why = f"the gateway closed the connection ({message.data}): {message.extra or 'without a reason'}"
                if message.data in FINAL:
                    raise StartupError(why)
                return why
            if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                return "the connection to the gateway was lost"
            try:
                frame = self._codec.decode(message.data)
            except Malformed as error:
                log.warning("malformed frame from the gateway: %s", error)
                continue
            match frame:
                case frames.Welcome():
                    self.welcome = frame
                    log.info(
                        "working for gateway %s as %s, %s, %d slots; models in demand: %s", frame.gateway, frame.session,
                        "on probation: probes come first" if frame.tier == "probation" else f"tier {frame.tier}",
                        frame.slots, ", ".join(frame.models) or "not told",
                    )
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
        origin = Origin.of(frame.job, frame.trace)
        with about(origin):
            log.info("job %s, attempt %d, of the gateway", frame.job, frame.attempt)
            try:
                stream = self._source(frame)
            except HeadraceError as error:
                self.send(_failure(frame.job, frame.attempt, error))
                return
        self._runs[frame.job] = _Run(frame, stream, origin)
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
        texts: list[TextRow] = []
        begun: list[Begun] = []
        after: list[Struct] = []
        for job in due:
            run = self._runs.get(job)
            if run is None:
                continue
            last = self._take(run, rows, texts)
            if not run.begun and run.stream.count:
                run.begun = True
                begun.append((job, run.attempt, run.stream.cached_tokens, run.stream.queue_seconds))
            if last is not None:
                after.append(last)
                del self._runs[job]
                run.stream.close()
        if rows:
            self.send(frames.Step(rows, begun))
        if texts:
            self.send(frames.TextStep(texts))
        if any(isinstance(frame, frames.Fail | frames.Nack) for frame in after):
            self.offer()  # first: nothing more comes here if what runs the jobs is gone
        for frame in after:  # the last row of a text has told its end
            if not (self._speaks_text and isinstance(frame, frames.Done)):
                self.send(frame)

    def _take(self, run: _Run, rows: list[Row], texts: list[TextRow]) -> Struct | None:
        """A run's new tokens into rows, of ids or of text; its last frame if it has ended."""
        try:
            tokens = run.stream.take()
        except HeadraceError as error:
            return _failure(run.job, run.attempt, error)
        self._tally.tokens += len(tokens)
        for token in tokens:
            if token.prompt is not None:
                told = [(p.id, p.logprob, _pairs(p.top) if p.top is not None else None) for p in token.prompt]
                self.send(frames.PromptTokens(run.job, run.attempt, told))
            if not self._speaks_text:
                rows.append(_row(run, token))
                run.index += 1
            elif token.text or token.id >= 0 or token.end is not None:
                texts.append(_text_row(run, token))
                run.index += 1
            if token.end is not None:
                self._tally.done += 1
                with about(run.origin):
                    log.info("job %s has ended here: %d tokens, %s", run.job, run.index, token.end.finish_reason)
                return frames.Done(run.job, run.attempt, FINISHES[token.end.finish_reason])
        return None


def _row(run: _Run, token: Token) -> Row:
    return run.job, run.attempt, run.index, token.id, token.logprob, 0, _pairs(token.top or [])


def _text_row(run: _Run, token: Token) -> TextRow:
    token_id = token.id if token.id >= 0 else None
    logprob = None if math.isnan(token.logprob) else token.logprob
    finish = FINISHES[token.end.finish_reason] if token.end is not None else None
    return run.job, run.attempt, run.index, token.text, token_id, logprob, _pairs(token.top or []), finish


def _pairs(top: list[TopToken]) -> list[tuple[int, float]]:
    return [(entry.id, entry.logprob) for entry in top]


def _failure(job: str, attempt: int, error: HeadraceError) -> Struct:
    if isinstance(error, Overloaded):
        return frames.Nack(job, attempt)
    wrong = isinstance(error, InvalidRequest)
    return frames.Fail(job, attempt, "bad_request" if wrong else "internal", not wrong, str(error)[:500])


class Agent:
    """Keeps a connection to a gateway for as long as this worker lives."""

    def __init__(
        self, url: str, token: str, model: frames.Model, lender: Lender, source: Source,
        rest: Callable[[float], float] = lambda pause: random.uniform(0, pause),
    ) -> None:
        """`url`: of the gateway, ws or wss; `rest`: seconds to wait, of so many at most (full jitter)."""
        self.gateway, self.model, self.lender, self.tally = url, model, lender, Tally()
        self._url, self._token, self._source, self._rest = url.rstrip("/") + PATH, token, source, rest
        self._connection: Connection | None = None
        self._leaving = False

    @property
    def connected(self) -> bool:
        return self._connection is not None and self._connection.welcome is not None

    @property
    def running(self) -> int:
        """Jobs."""
        return self._connection.running if self._connection is not None else 0

    def pause(self, paused: bool) -> None:
        """Take no new jobs, or take them again."""
        self.lender.paused = paused
        if self._connection is not None:
            self._connection.offer()

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
                    why = await self._connect(client)
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in REFUSALS:
                        text = f"the gateway {self._url} refuses this worker: {REFUSALS[error.status]}"
                        raise StartupError(text) from None
                    why = f"the gateway answers {error.status}"
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    why = f"the gateway cannot be reached: {error or type(error).__name__}"
                if not self._leaving:
                    pause = PAUSES[0] if time.monotonic() - began > PAUSES[1] else min(pause * 2, PAUSES[1])
                    log.warning("%s; trying again within %g s", why, pause)
                    await asyncio.sleep(self._rest(pause))
        await asyncio.Event().wait()  # what is local goes on to its end

    async def _connect(self, client: aiohttp.ClientSession) -> str:
        headers = {"Authorization": f"Bearer {self._token}"}
        async with client.ws_connect(
            self._url, headers=headers, protocols=PROTOCOLS, heartbeat=frames.HEARTBEAT, max_msg_size=LARGEST_FRAME
        ) as socket:
            codec = Codec(socket.protocol or PROTOCOLS[-1], frames.FromGateway)
            connection = Connection(socket, codec, self._source, TEXT in self.model.features, self.lender, self.tally)
            await connection.write_now(connection.hello(self.model))
            self._connection = connection
            work = (connection.write(), connection.report(), connection.look())
            tasks = [asyncio.create_task(task) for task in work]
            try:
                return await connection.read()
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
                async with asyncio.timeout(BYE_SECONDS):
                    await self._connection.write_now(frames.Bye("the worker stops"))
            except (ConnectionError, TimeoutError) as error:
                log.debug("no good-bye: %s", error)
