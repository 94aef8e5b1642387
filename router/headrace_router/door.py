"""Whether a new request may wait: the bounds of the queue, and its deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace._common.errors import QueueFull, WouldBeLate
from headrace_router.pace import Forecast
from headrace_router.presets import Preset
from headrace_router.tenants import Tenant


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


class Door:
    """Refuses what must not wait. Where nobody waits, everything may come in."""

    def __init__(self, bounds: Preset, batch: Batch, forecast: Forecast, retry_after: Callable[[], float]) -> None:
        """`retry_after`: seconds to tell a client that is turned away."""
        self._bounds, self._batch, self._forecast, self._retry_after = bounds, batch, forecast, retry_after

    def check(self, workload: str, tenant: Tenant, prompt: int, most: int, least: int, left: float | None) -> None:
        """A request of so many prompt tokens that may produce `most` tokens, and will produce `least`, and whose deadline is in
        `left` seconds.

        Raises:
            QueueFull: too many wait, by requests or by tokens; `WouldBeLate`: for it to be in time.
        """
        backlog, bounds = self._batch.backlog, self._bounds
        tokens = self._batch.waiting_tokens + prompt + most
        if backlog >= bounds.max_queue_size or (backlog > 0 and tokens > bounds.max_queue_tokens):
            raise QueueFull("Model is overloaded: the queue is full", self._retry_after())
        if left is not None and backlog >= 0:
            need = self._batch.wait(workload, tenant) + self._forecast.stay(workload, most, least)
            if need > left:
                raise WouldBeLate(
                    f"Model is overloaded: the request would need about {need:.3g} s, and has {left:.3g} s", self._retry_after()
                )
