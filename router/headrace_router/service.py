"""What the handlers of one router share, and the ticket that every generation call holds while it is served."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from types import TracebackType

from aiohttp import web

from headrace._common.errors import (
    DeadlineExceeded,
    GenerationFailed,
    HeadraceError,
    Incomplete,
    InvalidRequest,
    Overloaded,
    RateLimited,
    TemplateError,
    TooSlow,
    Unhealthy,
)
from headrace._common.logs import ORIGIN, about
from headrace_router.engine import Backend, Engine
from headrace_router.grammars import GrammarChecker
from headrace_router.limits import Limits
from headrace_router.metrics import Gauges, Metrics
from headrace_router.network.role import Network
from headrace_router.pace import Forecast, Pace
from headrace_router.rates import Meters
from headrace_router.settings import RouterSettings
from headrace_router.tenants import Tenants
from headrace_router.text.pool import TextPool
from headrace_router.types import End, GenerateRequest

log = logging.getLogger(__name__)

_FAILURES: tuple[tuple[type[HeadraceError], str], ...] = (
    (RateLimited, "rate_limited"), (Overloaded, "overloaded"), (DeadlineExceeded, "timeout"),
    (TooSlow, "timeout"), (TemplateError, "template"),
    (GenerationFailed, "generation"), (Incomplete, "incomplete"), (Unhealthy, "unhealthy"),
)  # everything else is the client's: "validation"


@dataclass
class Service:
    """One router: settings, parts, and how many calls are being served."""

    settings: RouterSettings
    limits: Limits
    shard: Backend
    text: TextPool
    engine: Engine
    metrics: Metrics
    gauges: Gauges
    tenants: Tenants
    meters: Meters
    pace: Pace
    forecast: Forecast
    tokenizer_hash: str
    grammars: GrammarChecker
    network: Network | None = None  # of a gateway
    background: set[asyncio.Task[None]] = field(default_factory=set)  # requests that nobody need be connected for
    draining: bool = False
    active: int = 0  # permits taken
    last_id: int = 0

    @property
    def model_name(self) -> str:
        return self.settings.model_id or self.shard.info.model_id

    def retry_after(self) -> float:
        """Turn a client away: seconds until there may be a place for it."""
        return self.pace.retry_after(self.active)


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


class Ticket:
    """One call of a generation route: its permits, and its place in metrics and log.

    Its `with` block counts the call as failed if it is left by an error or a cancellation.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._permits = 0
        self._failed = False
        self._arrival = time.perf_counter()
        self.validated: float | None = None  # seconds from arrival to submission
        service.last_id += 1
        self.id = service.last_id
        self._origin = ORIGIN.get()

    def __enter__(self) -> Ticket:
        self._service.metrics.request_count += 1
        return self

    def take(self, permits: int = 1) -> None:
        """Take permits for as long as the call lasts.

        Raises:
            Unhealthy: the service is stopping.
            Overloaded: there are too few left. Nobody waits for one.
        """
        service = self._service
        if service.draining:
            raise Unhealthy("the server is stopping")
        if service.active + permits > service.settings.max_concurrent_requests:
            raise Overloaded("Model is overloaded", service.retry_after())
        service.active += permits
        self._permits += permits

    @property
    def seconds(self) -> float:
        """Since arrival."""
        return time.perf_counter() - self._arrival

    def submitted(self) -> None:
        """Checks and tokenizing are done."""
        self.validated = self.seconds

    def fail(self, error: BaseException) -> None:
        """The call ends with `error`, or with its client gone. What users wrote is not logged: only the kind is."""
        if self._failed:
            return
        self._failed = True
        if isinstance(error, HeadraceError):
            kind = next((name for cls, name in _FAILURES if isinstance(error, cls)), "validation")
        elif isinstance(error, (asyncio.CancelledError, ConnectionError)):
            kind = "dropped"
        else:
            kind = "generation"
        self._service.metrics.request_failure[kind] += 1
        level = logging.WARNING if kind in ("generation", "incomplete") else logging.INFO
        if not isinstance(error, InvalidRequest):
            log.log(level, "request %d failed after %.3f s: %s", self.id, self.seconds, kind)

    def ended(self, request: GenerateRequest, end: End) -> None:
        """One of the call's requests has ended well."""
        metrics, tokens = self._service.metrics, max(end.generated_tokens, 1)
        validation = self.validated or 0.0
        metrics.validation_duration.observe(validation)
        metrics.queue_duration.observe(end.queue_seconds)
        metrics.inference_duration.observe(end.inference_seconds)
        metrics.time_per_token.observe(end.inference_seconds / tokens)
        metrics.generated_tokens.observe(end.generated_tokens)
        metrics.max_new_tokens.observe(request.max_new_tokens)
        metrics.input_length.observe(end.input_length)
        self._service.forecast.ended(request.workload, request.max_new_tokens, end.generated_tokens, end.inference_seconds)
        with about(self._origin):  # a stream's end is found in the engine's own task
            log.info(
                "request %d of %s, %s: %d prompt tokens, %d tokens, %s; validation %.1f ms, queue %.1f ms, inference %.1f ms",
                self.id, request.tenant.name, request.workload, end.input_length, end.generated_tokens, end.finish_reason,
                validation * 1e3, end.queue_seconds * 1e3, end.inference_seconds * 1e3,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.active -= self._permits
        if error is not None:
            self.fail(error)
        elif not self._failed:
            self._service.metrics.request_success += 1
            self._service.pace.ended(self.seconds)
            self._service.metrics.request_duration.observe(self.seconds)
