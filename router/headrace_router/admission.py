"""The door of an engine: who may come in now, what that costs its tenant, and when it must be out again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from headrace._common.errors import DeadlineExceeded, QueueFull, WouldBeLate
from headrace_router.engine import Engine
from headrace_router.metrics import Metrics
from headrace_router.pace import Forecast
from headrace_router.presets import Preset
from headrace_router.rates import Meter, Meters
from headrace_router.streams import TokenStream
from headrace_router.tenants import Tenant
from headrace_router.types import GenerateRequest


class Batch(Protocol):
    """What the door must know of those who are in already."""

    @property
    def backlog(self) -> int:
        """Requests that wait for a place that somebody else has; negative: places that are free."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the waiting requests may take."""
        ...

    def wait(self, workload: str, tenant: Tenant) -> float:
        """Seconds that a new request will be in the queue, if it has to wait at all."""
        ...


class Admission:
    """An engine in front of another one.

    - A queue that is full, by requests or by tokens, refuses; a single request may always wait, however large it is.
    - A request that will not meet its deadline, by what others of its class wait and take, is refused, and one that has no
      first token when only its other tokens would still fit, at best, is dropped: what it would take is left to those who
      can. Both only while others wait.
    - Prompt tokens are charged to the tenant when a request is taken; output tokens when it leaves, whoever ended it.
      What produced nothing costs nothing.
    - A request whose deadline passes ends with an error, and is cancelled wherever it is: waiting, it is dropped before
      its prefill.
    """

    def __init__(
        self, engine: Engine, batch: Batch, meters: Meters, metrics: Metrics, bounds: Preset, forecast: Forecast,
        retry_after: Callable[[], float],
    ) -> None:
        """`bounds`: of the queue. `retry_after`: seconds to tell a client that is turned away."""
        self._engine = engine
        self._meters = meters
        self._metrics = metrics
        self._batch = batch
        self._bounds = bounds
        self._forecast = forecast
        self._retry_after = retry_after

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
        self._check_queue(request, left)
        meter = self._meters.of(request.tenant)
        meter.charge(len(request.prompt))
        stream = self._engine.submit(request)
        timers: list[asyncio.TimerHandle] = []
        if left is not None:
            loop = asyncio.get_running_loop()
            timers = [loop.call_later(left, self._expire, request, stream)]
            if 0 < (rest := self._forecast.rest(request.workload, request.max_new_tokens, request.min_new_tokens)) < left:
                timers.append(loop.call_later(left - rest, self._shed, request, stream))
        stream.on_close(lambda: self._settle(request, stream, meter, timers))
        return stream

    def _check_queue(self, request: GenerateRequest, left: float | None) -> None:
        """`left`: seconds until its deadline."""
        backlog, bounds = self._batch.backlog, self._bounds
        tokens = self._batch.waiting_tokens + len(request.prompt) + request.max_new_tokens
        if backlog >= bounds.max_queue_size or (backlog > 0 and tokens > bounds.max_queue_tokens):
            raise QueueFull("Model is overloaded: the queue is full", self._retry_after())
        if left is not None and backlog >= 0:
            need = self._batch.wait(request.workload, request.tenant)
            need += self._forecast.stay(request.workload, request.max_new_tokens, request.min_new_tokens)
            if need > left:
                raise WouldBeLate(
                    f"Model is overloaded: the request would need about {need:.3g} s, and has {left:.3g} s", self._retry_after()
                )

    def _shed(self, request: GenerateRequest, stream: TokenStream) -> None:
        if not stream.done and not stream.count and self._batch.backlog > 0:
            stream.abort(self._late(request, "hopeless"))

    def _expire(self, request: GenerateRequest, stream: TokenStream) -> None:
        if not stream.done:
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
