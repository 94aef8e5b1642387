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

from aiohttp import WSMsgType, web
from msgspec import Struct

from headrace_router.network import frames
from headrace_router.network.broker import Broker
from headrace_router.network.frames import Codec, Malformed
from headrace_router.network.jobs import Lease, Progress
from headrace_router.network.output import JobOutput
from headrace_router.network.wire import to_frame

log = logging.getLogger(__name__)

OUTBOX = 1024  # frames
INBOX = 16 << 20  # bytes of frames that wait while the broker does not answer
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
        self.outputs: dict[str, JobOutput] = {}
        self.connected = time.time()
        self.tokens = 0
        self.leaving = False
        self.unknown_frames = 0
        self._socket, self._codec, self._broker, self._freed = socket, codec, broker, freed
        self._outbox: asyncio.Queue[Struct] = asyncio.Queue(OUTBOX)
        self._inbox: asyncio.Queue[bytes | str | None] = asyncio.Queue()  # None: the connection has ended
        self._inbox_bytes = 0
        self._rests_until = 0.0  # time.monotonic(): it has said that it is busy
        self._last_token = 0.0  # time.monotonic()
        self._rate: deque[tuple[float, int]] = deque()
        self._closing: asyncio.Task[None] | None = None

    @property
    def free(self) -> int:
        """Jobs that it can take."""
        resting = self.leaving or time.monotonic() < self._rests_until
        return 0 if resting else self.slots - len(self.outputs)

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

    def start(self, lease: Lease, output: JobOutput) -> None:
        """Hand a job over."""
        self.outputs[lease.job.id] = output
        self.send(to_frame(lease, self.model.id))

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
        """Act on frames until the connection ends; says why it did.

        Raises:
            BrokerUnavailable: for longer than its grace.
        """
        receiving = asyncio.create_task(self._receive())
        try:
            return await self._act_on_all()
        finally:
            receiving.cancel()

    async def _receive(self) -> None:
        """Take frames as they come, so that pings are answered while the broker is waited for."""
        try:
            async for message in self._socket:
                if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    return
                self._inbox_bytes += len(message.data)
                if self._inbox_bytes > INBOX:
                    self.close(4408, "too many of your frames wait")
                    return
                self._inbox.put_nowait(message.data)
        finally:
            self._inbox.put_nowait(None)

    async def _act_on_all(self) -> str:
        wrong = 0
        while (data := await self._inbox.get()) is not None:
            self._inbox_bytes -= len(data)
            try:
                frame = self._codec.decode(data)
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
            case frames.Step():
                await self._step(frame)
            case frames.PromptTokens():
                if (output := self._output(frame.job, frame.attempt)) is not None:
                    output.take_prompt(frame.tokens)
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

    def _output(self, job: str, attempt: int) -> JobOutput | None:
        """What this worker holds; for anything else it is told to stop."""
        output = self.outputs.get(job)
        if output is None or output.lease.attempt != attempt:
            self.send(frames.Cancel(job[:64], attempt, "stale"))
            return None
        return output

    async def _step(self, frame: frames.Step) -> None:
        """The tokens of one step, of all jobs at once."""
        now, before = time.monotonic(), self.tokens
        news: list[Progress] = []
        wrong: Malformed | None = None
        for (job, attempt), rows in groupby(frame.x, key=lambda row: (row[0], row[1])):
            output = self._output(job, attempt)
            if output is None:
                continue
            try:
                made = output.take(list(rows))
            except Malformed as error:
                wrong = error
                await self._give_back(job, attempt, "garbage")
                continue
            news.append(made)
            self.tokens += len(made.tokens)
            if made.end is not None:
                del self.outputs[job]
        if news:
            await self._hand_over(news)
        self._last_token = now
        self._rate.append((now, self.tokens - before))
        if wrong is not None:
            raise wrong

    async def _hand_over(self, news: list[Progress]) -> None:
        freed = False
        for one, taken in zip(news, await self._broker.progress(news), strict=True):
            if not taken or one.end is not None:
                freed = True
                self.outputs.pop(one.job, None)
                if not taken or (one.end is not None and one.end.finish_reason == "stop_sequence"):
                    self.send(frames.Cancel(one.job, one.attempt, "stop" if taken else "stale"))
        if freed:
            await self._freed()

    async def _done(self, frame: frames.Done) -> None:
        output = self.outputs.get(frame.job)
        if output is None or output.lease.attempt != frame.attempt:
            return  # its last token has told the end, or it was cancelled
        if frame.finish == "cancelled":  # by itself: somebody else may run it
            await self._give_back(frame.job, frame.attempt, "nack")
            return
        news = output.finish(frame.finish)
        self.outputs.pop(frame.job, None)
        await self._broker.progress([news])
        await self._freed()

    async def _fail(self, frame: frames.Fail) -> None:
        if self._output(frame.job, frame.attempt) is None:
            return
        log.warning("worker %s: a job failed: %s: %s", self.id, frame.code[:40], frame.message[:200])
        if frame.retriable:
            await self._give_back(frame.job, frame.attempt, frame.code[:40])
            return
        del self.outputs[frame.job]
        await self._broker.fail(frame.job, frame.attempt, frame.code[:40], frame.message[:500])
        await self._freed()

    async def _give_back(self, job: str, attempt: int, reason: str) -> None:
        self.outputs.pop(job, None)
        await self._broker.release(job, attempt, reason)
        await self._freed()
