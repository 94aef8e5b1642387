"""The gateway's end of one worker's connection.

One task reads and acts on frames in order, one task writes from a bounded outbox. A frame that is wrong costs the job that
it is about; the third one costs the connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import groupby
from operator import itemgetter

from aiohttp import WSMsgType, web
from msgspec import Struct

from headrace_router.network import frames
from headrace_router.network.broker import Broker
from headrace_router.network.frames import Codec, Malformed
from headrace_router.network.jobs import Holder, Lease
from headrace_router.network.output import JobOutput
from headrace_router.network.text_output import TextOutput
from headrace_router.network.wire import to_frame

log = logging.getLogger(__name__)

_attempt = itemgetter(0, 1)  # of a row

OUTBOX = 1024  # frames
WRITE_SECONDS = 10.0  # for one frame
MALFORMED = 3  # frames, until the connection is closed
NACK_SECONDS = 1.0  # without jobs for a worker that has refused one
RATE_SECONDS = 10.0  # over which tokens a second are counted


class Session:
    """One connected worker. `outputs` are the jobs that it holds."""

    def __init__(
        self, name: str, worker: str, socket: web.WebSocketResponse, codec: Codec, hello: frames.Hello, slots: int,
        broker: Broker, freed: Callable[[], Awaitable[None]],
    ) -> None:
        """`worker`: the id of its token; `slots`: as granted; `freed`: to be called when there may be a free slot."""
        self.id, self.worker, self.hello, self.slots = name, worker, hello, slots
        self.model = hello.models[0]
        self.speaks_text = frames.TEXT in self.model.features
        self.outputs: dict[str, JobOutput | TextOutput] = {}
        self.offered = slots if hello.capacity is None else max(hello.capacity, 0)  # jobs that its lender lets it take now
        text = self.speaks_text
        self.holder = Holder(
            name, self.model.format, self.model.max_total, features=frozenset(self.model.features) if text else None,
            resumes=not text,
        )
        self.connected = time.time()
        self.tokens = 0
        self.leaving = False
        self.unknown_frames = 0
        self._socket, self._codec, self._broker, self._freed = socket, codec, broker, freed
        self._outbox: asyncio.Queue[Struct] = asyncio.Queue(OUTBOX)
        self._rests_until = 0.0  # time.monotonic(): it has said that it is busy
        self._last_token = 0.0  # time.monotonic()
        self._rate: deque[tuple[float, int]] = deque()
        self._closing: asyncio.Task[None] | None = None

    @property
    def free(self) -> int:
        """Jobs that it can take."""
        resting = self.leaving or time.monotonic() < self._rests_until
        return 0 if resting else min(self.slots, self.offered) - len(self.outputs)

    @property
    def tokens_per_second(self) -> float:
        since = time.monotonic() - RATE_SECONDS
        while self._rate and self._rate[0][0] < since:
            self._rate.popleft()
        return sum(count for _, count in self._rate) / RATE_SECONDS

    # --- sending ---

    def send(self, frame: Struct) -> None:
        """Queue a frame; a worker that does not take them is cut off."""
        try:
            self._outbox.put_nowait(frame)
        except asyncio.QueueFull:
            self.close(4408, "too many frames wait for you")

    def start(self, lease: Lease, output: JobOutput | TextOutput) -> None:
        """Hand a job over."""
        self.outputs[lease.job.id] = output
        self.send(to_frame(lease, self.model.id, output.prompt_text if isinstance(output, TextOutput) else None))

    def revoke(self, job: str, attempt: int, reason: str) -> None:
        """A job is not this worker's any more."""
        output = self.outputs.get(job)
        if output is not None and output.lease.attempt == attempt:
            del self.outputs[job]
            self.send(frames.Cancel(job, attempt, reason))

    def close(self, code: int, reason: str) -> None:
        """End the connection; jobs are released when it has ended."""
        self.leaving = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(code, reason))

    async def _close(self, code: int, reason: str) -> None:
        log.info("worker %s: closed with %d: %s", self.id, code, reason)
        await self._socket.close(code=code, message=reason.encode()[:120])

    async def write(self) -> None:
        """Write frames until the connection ends."""
        while True:
            data = self._codec.encode(await self._outbox.get())
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await (self._socket.send_str(data.decode()) if self._codec.is_text else self._socket.send_bytes(data))
            except (TimeoutError, ConnectionError):
                self.close(4408, "you do not read")
                return

    # --- receiving ---

    async def read(self) -> str:
        """Act on frames until the connection ends; says why it did."""
        wrong = 0
        async for message in self._socket:
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return "the connection failed"
            try:
                frame = self._codec.decode(message.data)
                if frame is None:
                    self.unknown_frames += 1
                elif await self._act(frame):
                    return "it left"
            except Malformed as error:
                wrong += 1
                log.warning("worker %s: malformed frame: %s", self.id, error)
                if wrong >= MALFORMED:
                    self.close(4400, "malformed frames")
        return "the connection was closed"

    async def _act(self, frame: Struct) -> bool:
        """True: the worker says good-bye."""
        match frame:
            case frames.Step() | frames.TextStep():
                await self._step(frame)
            case frames.PromptTokens():
                if isinstance(output := self._output(frame.job, frame.attempt), JobOutput):
                    output.take_prompt(frame.tokens)
            case frames.Capacity():
                self.offered = max(frame.slots, 0)
                await self._freed()
            case frames.Done():
                await self._done(frame)
            case frames.Nack():
                if self._output(frame.job, frame.attempt) is not None:
                    self._rests_until = time.monotonic() + NACK_SECONDS
                    await self._give_back(frame.job, frame.attempt, "nack")
            case frames.Fail():
                await self._fail(frame)
            case frames.Status():
                if time.monotonic() - self._last_token < RATE_SECONDS:
                    await self._broker.renew(self.id, [(job, attempt) for job, attempt, _ in frame.running])
            case frames.Ping():
                self.send(frames.Pong(frame.n))
            case frames.Bye():
                self.leaving = True
                return True
        return False

    def _output(self, job: str, attempt: int) -> JobOutput | TextOutput | None:
        """What this worker holds; for anything else it is told to stop."""
        output = self.outputs.get(job)
        if output is None or output.lease.attempt != attempt:
            self.send(frames.Cancel(job[:64], attempt, "stale"))
            return None
        return output

    async def _step(self, frame: frames.Step | frames.TextStep) -> None:
        if isinstance(frame, frames.TextStep) is not self.speaks_text:
            raise Malformed("a worker sends token ids, or text if its hello says so")
        now, before = time.monotonic(), self.tokens
        for (job, attempt), rows in groupby(frame.x, key=_attempt):
            output = self._output(job, attempt)
            if output is None:
                continue
            try:
                news = output.take(list(rows))  # type: ignore[arg-type]
            except Malformed:
                await self._give_back(job, attempt, "garbage")
                raise
            self.tokens += len(news.tokens)
            taken = await self._broker.progress(news)
            if not taken or news.end is not None:
                self.outputs.pop(job, None)
                if not taken or (news.end is not None and news.end.finish_reason == "stop_sequence"):
                    self.send(frames.Cancel(job, attempt, "stop" if taken else "stale"))
                await self._freed()
        self._last_token = now
        self._rate.append((now, self.tokens - before))

    async def _done(self, frame: frames.Done) -> None:
        output = self.outputs.get(frame.job)
        if output is None or output.lease.attempt != frame.attempt:
            return  # its last token has told the end, or it was cancelled
        if frame.finish == "cancelled":  # by itself: somebody else may run it
            await self._give_back(frame.job, frame.attempt, "nack")
            return
        news = output.finish(frame.finish)
        self.outputs.pop(frame.job, None)
        await self._broker.progress(news)
        await self._freed()

    async def _fail(self, frame: frames.Fail) -> None:
        if self._output(frame.job, frame.attempt) is None:
            return
        code = frame.code if frame.code in frames.FAILURES else "internal"
        log.warning("worker %s: a job failed: %s: %r", self.id, code, frame.message[:200])
        if frame.retriable:
            await self._give_back(frame.job, frame.attempt, code)
            return
        del self.outputs[frame.job]
        await self._broker.fail(frame.job, frame.attempt, code, frame.message[:500])
        await self._freed()

    async def _give_back(self, job: str, attempt: int, reason: str) -> None:
        self.outputs.pop(job, None)
        await self._broker.release(job, attempt, reason)
        await self._freed()
