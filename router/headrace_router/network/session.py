"""One worker as the gateway sees it: the jobs that it holds, and what its frames mean for them.

Frames are acted on in order. One that is wrong costs the job that it is about; the third one costs the connection. A frame
about a job that the worker does not hold changes nothing, and the worker is told to stop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import groupby
from operator import itemgetter

from msgspec import Struct

from headrace._common.logs import about
from headrace_router.network import features, frames
from headrace_router.network.broker import Broker
from headrace_router.network.frames import Malformed
from headrace_router.network.jobs import TIERS, Holder, Lease, Progress
from headrace_router.network.line import Line
from headrace_router.network.metrics import NetworkMetrics
from headrace_router.network.output import JobOutput
from headrace_router.network.speed import Speed
from headrace_router.network.text_output import TextOutput
from headrace_router.network.wire import to_frame

log = logging.getLogger(__name__)

_attempt = itemgetter(0, 1)  # of a row

NACK_SECONDS = 1.0  # without jobs for a worker that is busy
ACCEPT_SECONDS = 5.0  # until a worker must have said something of a job: its event loop may be busy, its lease is longer
RATE_SECONDS = 10.0  # over which tokens a second are counted
UNANSWERED = 60.0  # seconds after which a cancel is not waited for


class Session:
    """One connected worker. `outputs` are the jobs that it holds."""

    def __init__(
        self, name: str, worker: str, line: Line, hello: frames.Hello, slots: int, broker: Broker, metrics: NetworkMetrics,
        freed: Callable[[], Awaitable[None]],
    ) -> None:
        """`worker`: the id of its token; `slots`: as granted; `freed`: to be called when there may be a free slot."""
        self.id, self.worker, self.line, self.hello, self.slots = name, worker, line, hello, slots
        self.model = hello.models[0]
        self.speaks_text = frames.TEXT in self.model.features
        self.outputs: dict[str, JobOutput | TextOutput] = {}
        self.offered = hello.slots if hello.capacity is None else max(hello.capacity, 0)  # jobs that its lender gives
        self.holder = Holder(
            name, self.model.format, self.model.max_total, features=features.offered(self.model),
            resumes=features.resumes(self.model.features),
        )
        self.connected = time.time()
        self.tokens = 0
        self.leaving = False
        self.round_trip: float | None = None  # seconds, of the last ping
        self._broker, self._metrics, self._freed = broker, metrics, freed
        self._claimed = hello.slots  # jobs that it could hold by its last status
        self._kv_tokens: int | None = None  # that its jobs could grow to by its last status
        self._rests_until = 0.0  # time.monotonic(): it has said that it is busy
        self._last_token = 0.0  # time.monotonic()
        self._work, self._worked = 0, 0.0  # tokens since then, time.monotonic()
        self._speed = Speed()
        self._rate: deque[tuple[float, int]] = deque()
        self._pings: dict[int, float] = {}
        self._cancelled: dict[tuple[str, int], float] = {}

    @property
    def free(self) -> int:
        """Jobs that it can take: of the slots that were granted, that it offers, and that its last status has."""
        return 0 if self.resting else max(min(self.slots, self.offered, self._claimed) - len(self.outputs), 0)

    @property
    def resting(self) -> bool:
        """Does it take no jobs now?"""
        return self.leaving or self.line.closing or time.monotonic() < self._rests_until

    @property
    def state(self) -> str:
        """As it is shown: leaving, paused (by its lender), working or idle."""
        if self.leaving or self.line.closing:
            return "leaving"
        return "paused" if not self.offered else "working" if self.outputs else "idle"

    @property
    def tier(self) -> str:
        """How far it is trusted."""
        return next((name for name, tier in TIERS.items() if tier == self.holder.tier), "probation")

    def room(self, share: float) -> int | None:
        """Tokens that more jobs may be allowed, if jobs use that share of what they are allowed; None: it does not say."""
        if self._kv_tokens is None:
            return None
        return int(self._kv_tokens / share) - sum(output.lease.job.total_tokens for output in self.outputs.values())

    @property
    def tokens_per_second(self) -> float:
        """Output tokens, of the last seconds."""
        since = time.monotonic() - RATE_SECONDS
        while self._rate and self._rate[0][0] < since:
            self._rate.popleft()
        return sum(count for _, count in self._rate) / RATE_SECONDS

    @property
    def speed(self) -> float:
        """Tokens a second, prompts included, while it has work; 0 if nothing is known."""
        return self._speed.value

    # --- to the worker ---

    def start(self, lease: Lease, output: JobOutput | TextOutput) -> None:
        """Hand a job over."""
        if not self.outputs:
            self._worked = time.monotonic()
        self.outputs[lease.job.id] = output
        self.line.send(to_frame(lease, self.model.id, output.prompt_text if isinstance(output, TextOutput) else None))
        with about(lease.job.origin):
            log.info("job %s, attempt %d, goes to worker %s", lease.job.id, lease.attempt, self.id)

    def revoke(self, job: str, attempt: int, reason: str) -> None:
        """A job is not this worker's any more."""
        output = self.outputs.get(job)
        if output is not None and output.lease.attempt == attempt:
            del self.outputs[job]
            self._cancel(job, attempt, reason)

    def close(self, code: int, reason: str) -> None:
        """End the connection; jobs are released when it has ended."""
        self.leaving = True
        self.line.close(code, reason)

    def _cancel(self, job: str, attempt: int, reason: str) -> None:
        self._cancelled[job, attempt] = time.monotonic()
        self.line.send(frames.Cancel(job, attempt, reason))

    def ping(self) -> None:
        """Measure the way to the worker and back."""
        now = time.monotonic()
        number = int(now * 1000)
        self._pings = {number: now}  # an answer that is later than the next ping is none
        self.line.send(frames.Ping(number))

    async def sweep(self) -> None:
        """Take back the jobs of which the worker has said nothing; forget what it will not answer."""
        now = time.monotonic()
        for output in list(self.outputs.values()):
            if not output.heard and now - output.sent >= ACCEPT_SECONDS and not self.line.unread:
                lease = output.lease
                self.revoke(lease.job.id, lease.attempt, "stale")
                await self._give_back(lease.job.id, lease.attempt, "no_accept")
        for key in [key for key, sent in self._cancelled.items() if now - sent > UNANSWERED]:
            del self._cancelled[key]

    # --- from the worker ---

    async def run(self) -> str:
        """Act on frames until the connection ends; says why it did."""
        tasks = [asyncio.create_task(self.line.write()), asyncio.create_task(self.line.read())]
        try:
            async for frame in self.line.frames():
                try:
                    if await self._act(frame):
                        return "it left"
                except Malformed as error:
                    self.line.complain(error)
            await self.line.closed()
        finally:
            for task in tasks:
                task.cancel()
        return self.line.ended

    async def _act(self, frame: Struct) -> bool:
        """True: the worker says good-bye."""
        match frame:
            case frames.Step() | frames.TextStep():
                await self._step(frame)
            case frames.Accept():
                if (output := self._output(frame.job, frame.attempt)) is not None:
                    output.heard = True
            case frames.PromptTokens():
                if isinstance(output := self._output(frame.job, frame.attempt), JobOutput):
                    output.take_prompt(frame.tokens)
            case frames.Capacity():
                self.offered = max(frame.slots, 0)
                await self._freed()
            case frames.Done():
                await self._done(frame)
            case frames.Nack():
                await self._nack(frame)
            case frames.Fail():
                await self._fail(frame)
            case frames.Status():
                await self._status(frame)
            case frames.Ping():
                self.line.send(frames.Pong(frame.n))
            case frames.Pong():
                if (sent := self._pings.pop(frame.n or 0, None)) is not None:
                    self.round_trip = time.monotonic() - sent
                    self._metrics.round_trip.observe(self.round_trip)
            case frames.Bye():
                self.leaving = True
                return True
        return False

    def _output(self, job: str, attempt: int) -> JobOutput | TextOutput | None:
        """What this worker holds; for anything else it is told to stop."""
        output = self.outputs.get(job)
        if output is None or output.lease.attempt != attempt:
            self._metrics.stale_frames += 1
            self.line.send(frames.Cancel(job[:64], attempt, "stale"))
            return None
        return output

    async def _step(self, frame: frames.Step | frames.TextStep) -> None:
        if isinstance(frame, frames.TextStep) is not self.speaks_text:
            raise Malformed("a worker sends token ids, or text if its hello says so")
        now, before = time.monotonic(), self.tokens
        news: list[Progress] = []
        wrong: Malformed | None = None
        for job, attempt, cached, waited in frame.begun if isinstance(frame, frames.Step) else ():
            if (output := self._output(job, attempt)) is not None:
                output.begin(cached, waited)
        for (job, attempt), rows in groupby(frame.x, key=_attempt):
            output = self._output(job, attempt)
            if output is None:
                continue
            try:
                made = output.take(list(rows))  # type: ignore[arg-type]
            except Malformed as error:
                wrong = error
                await self._give_back(job, attempt, "garbage")
                continue
            news.append(made)
            self._measure(output, len(made.tokens), now)
            if made.end is not None:
                del self.outputs[job]
        if news:
            await self._hand_over(news)
        self._last_token = now
        self._rate.append((now, self.tokens - before))
        self._speed.worked(self._work, now - self._worked)
        self._work, self._worked = 0, now
        if wrong is not None:
            raise wrong

    def _measure(self, output: JobOutput | TextOutput, tokens: int, now: float) -> None:
        self._metrics.duplicates += output.duplicates
        output.heard = True
        if not tokens:
            return
        self.tokens += tokens
        self._work += tokens
        if output.last_token is not None:
            self._metrics.gap_at_worker.observe(now - output.last_token)
        else:
            self._work += len(output.lease.job.request.prompt) + len(output.lease.generated)
        output.last_token = now

    async def _hand_over(self, news: list[Progress]) -> None:
        """Tokens are the broker's before anybody is told of them."""
        freed = False
        for one, taken in zip(news, await self._broker.progress(news), strict=True):
            if not taken or one.end is not None:
                freed = True
                self.outputs.pop(one.job, None)
                if not taken or (one.end is not None and one.end.finish_reason == "stop_sequence"):
                    self._cancel(one.job, one.attempt, "stop" if taken else "stale")
        if freed:
            await self._freed()

    async def _done(self, frame: frames.Done) -> None:
        if (sent := self._cancelled.pop((frame.job, frame.attempt), None)) is not None:
            self._metrics.cancel_latency.observe(time.monotonic() - sent)
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

    async def _nack(self, frame: frames.Nack) -> None:
        if self._output(frame.job, frame.attempt) is None:
            return
        if frame.code == "draining":
            self.leaving = True
        elif frame.code != "unsupported":
            self._rests_until = time.monotonic() + NACK_SECONDS
        await self._give_back(frame.job, frame.attempt, "nack")

    async def _fail(self, frame: frames.Fail) -> None:
        output = self._output(frame.job, frame.attempt)
        if output is None:
            return
        with about(output.lease.job.origin):
            log.warning("worker %s: a job failed: %r: %r", self.id, frame.code[:40], frame.message[:200])
        if frame.retriable:
            await self._give_back(frame.job, frame.attempt, "fail")
            return
        del self.outputs[frame.job]
        await self._broker.fail(frame.job, frame.attempt, frame.code[:40], frame.message[:500])
        await self._freed()

    async def _status(self, frame: frames.Status) -> None:
        held = [(output, index) for job, attempt, index in frame.running
                if (output := self.outputs.get(job)) is not None and output.lease.attempt == attempt]
        for output, _ in held:
            output.heard = True
        if frame.slots_free is not None:
            self._claimed = max(frame.slots_free, 0) + len(frame.running)
        if frame.kv_free_tokens is not None:
            used = sum(len(output.lease.job.request.prompt) + output.length for output, _ in held)
            self._kv_tokens = max(frame.kv_free_tokens, 0) + used
        if time.monotonic() - self._last_token < RATE_SECONDS:
            await self._broker.renew(self.id, [(job, attempt) for job, attempt, _ in frame.running])
        await self._freed()

    async def _give_back(self, job: str, attempt: int, reason: str) -> None:
        self.outputs.pop(job, None)
        await self._broker.release(job, attempt, reason)
        await self._freed()
