"""The door of an engine: who may come in now, what that costs its tenant, and when it must be out again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace._common.errors import DeadlineExceeded, QueueFull
from headrace_router.engine import Engine
from headrace_router.metrics import Metrics
from headrace_router.rates import Meter, Meters
from headrace_router.streams import TokenStream
from headrace_router.types import GenerateRequest


class Admission:
    """An engine in front of another one.

    - A queue that is full refuses.
    - Prompt tokens are charged to the tenant when a request is taken; output tokens when it leaves, whoever ended it.
      What produced nothing costs nothing.
    - A request whose deadline passes ends with an error, and is cancelled wherever it is: waiting, it is dropped before
      its prefill.
    """

    def __init__(
        self, engine: Engine, meters: Meters, metrics: Metrics, backlog: Callable[[], int], max_queue_size: int | None,
        retry_after: Callable[[], float],
    ) -> None:
        """`backlog`: requests that wait for a place that somebody else has. `retry_after`: seconds to tell a client that
        is turned away.
        """
        self._engine = engine
        self._meters = meters
        self._metrics = metrics
        self._backlog = backlog
        self._max_queue_size = max_queue_size
        self._retry_after = retry_after

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Take a request.

        Raises:
            DeadlineExceeded: it is too late already.
            QueueFull: too many wait.
            RateLimited: its tenant has too few tokens left.
        """
        left = None if request.deadline is None else request.deadline - time.perf_counter()
        if left is not None and left <= 0:
            raise self._late(request, "waiting")
        if self._max_queue_size is not None and self._backlog() >= self._max_queue_size:
            raise QueueFull("Model is overloaded: the queue is full", self._retry_after())
        meter = self._meters.of(request.tenant)
        meter.charge(len(request.prompt))
        stream = self._engine.submit(request)
        timer = None
        if left is not None:
            timer = asyncio.get_running_loop().call_later(left, self._expire, request, stream)
        stream.on_close(lambda: self._settle(request, stream, meter, timer))
        return stream

    def _expire(self, request: GenerateRequest, stream: TokenStream) -> None:
        if not stream.done:
            stream.abort(self._late(request, "running" if stream.count else "waiting"))

    def _late(self, request: GenerateRequest, stage: str) -> DeadlineExceeded:
        self._metrics.late(request.tenant.name, request.workload, stage)
        return DeadlineExceeded(f"the request did not end within its X-Request-Timeout-Ms (it was {stage})")

    def _settle(
        self, request: GenerateRequest, stream: TokenStream, meter: Meter, timer: asyncio.TimerHandle | None
    ) -> None:
        if timer is not None:
            timer.cancel()
        prompt = len(request.prompt)
        if stream.count:
            self._metrics.used(request.tenant.name, prompt, stream.count)
            meter.correct(stream.count)
        else:
            meter.correct(-prompt)
