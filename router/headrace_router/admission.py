"""What stands before an engine: who is let in, what that costs its tenant, and when it must be out again."""

from __future__ import annotations

import asyncio
import time

from headrace._common.errors import DeadlineExceeded
from headrace_router.door import Batch, Door
from headrace_router.engine import Engine
from headrace_router.metrics import Metrics
from headrace_router.pace import Forecast
from headrace_router.rates import Meter, Meters
from headrace_router.streams import TokenStream
from headrace_router.types import GenerateRequest


class Admission:
    """An engine in front of another one.

    - A queue that is full, by requests or by tokens, refuses; a single request may always wait, however large it is.
    - A request that will not meet its deadline, by what others of its class wait and take, is refused. One that still waits
      when only what they take would fit is dropped, and so is one that has no first token when only its other tokens would
      fit, at best: what it would take is left to those who can. All of it only while others wait.
    - Prompt tokens are charged to the tenant when a request is taken; output tokens when it leaves, whoever ended it.
      What produced nothing costs nothing.
    - A request whose deadline passes ends with an error, and is cancelled wherever it is: waiting, it is dropped before
      its prefill.
    """

    def __init__(
        self, engine: Engine, batch: Batch, meters: Meters, metrics: Metrics, door: Door, forecast: Forecast
    ) -> None:
        self._engine = engine
        self._meters = meters
        self._metrics = metrics
        self._batch = batch
        self._door = door
        self._forecast = forecast

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Take a request.

        Raises:
            DeadlineExceeded: it is too late already.
            QueueFull: too many wait; `WouldBeLate`: for it to be in time.
            RateLimited: its tenant has too few tokens left.
        """
        left = None if request.deadline is None else request.deadline - time.perf_counter()
        if left is not None and left <= 0:
            raise self._late(request, "waiting")
        self._door.check(
            request.workload, request.tenant, len(request.prompt), request.max_new_tokens, request.min_new_tokens, left
        )
        meter = self._meters.of(request.tenant)
        meter.charge(len(request.prompt))
        stream = self._engine.submit(request)
        timers: list[asyncio.TimerHandle] = []
        if left is not None:
            loop = asyncio.get_running_loop()
            timers = [loop.call_later(left, self._expire, request, stream)]
            of = request.workload, request.max_new_tokens, request.min_new_tokens
            for need, shed in (
                (self._forecast.stay(*of), self._shed_waiting), (self._forecast.rest(*of), self._shed_silent),
            ):
                if 0 < need < left:
                    timers.append(loop.call_later(left - need, shed, request, stream))
        stream.on_close(lambda: self._settle(request, stream, meter, timers))
        return stream

    def _shed_waiting(self, request: GenerateRequest, stream: TokenStream) -> None:
        """There is no time left for what requests of its class take, as a rule."""
        if stream.placed is None:
            self._shed_silent(request, stream)

    def _shed_silent(self, request: GenerateRequest, stream: TokenStream) -> None:
        """There is no time left for its tokens after the first, at best."""
        if not stream.done and not stream.count and self._batch.backlog > 0:
            stream.abort(self._late(request, "hopeless"))

    def _expire(self, request: GenerateRequest, stream: TokenStream) -> None:
        if stream.done:
            return
        if stream.placed is not None:
            self._forecast.cut(request.workload, request.max_new_tokens, time.perf_counter() - stream.placed)
        stream.abort(self._late(request, "running" if stream.count else "waiting"))

    def _late(self, request: GenerateRequest, stage: str) -> DeadlineExceeded:
        self._metrics.late(request.tenant.name, request.workload, stage)
        verb = "cannot" if stage == "hopeless" else "did not"
        return DeadlineExceeded(f"the request {verb} end within its X-Request-Timeout-Ms (it was {stage})")

    def _settle(
        self, request: GenerateRequest, stream: TokenStream, meter: Meter, timers: list[asyncio.TimerHandle]
    ) -> None:
        for timer in timers:
            timer.cancel()
        prompt = len(request.prompt)
        if stream.count:
            self._metrics.used(request.tenant.name, prompt, stream.count)
            meter.correct(stream.count)
        else:
            meter.correct(-prompt)
