"""The stream of a request that is a job: its log's events as the tokens that the APIs read."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace._common.errors import DeadlineExceeded, GenerationFailed, HeadraceError, NoCapacity
from headrace_router.network.jobs import TERMINAL, Event, Job
from headrace_router.network.metrics import NetworkMetrics
from headrace_router.streams import TokenStream
from headrace_router.types import End, Token

NO_CAPACITY = "no_capacity"


class JobStream(TokenStream):
    """The stream of a request that is a job.

    Attributes:
        admitted: done when the broker has accepted or refused it: its position in the queue.
        kept: the job goes on when the gateway ends.
        names: ids of the events of the tokens that are there, one for each, if `number` was called.
    """

    __slots__ = ("__weakref__", "admitted", "job", "kept", "names")

    def __init__(self, job: str, on_cancel: Callable[[], None]) -> None:
        super().__init__(on_cancel)
        self.job, self.kept = job, False
        self.admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.names: deque[str] | None = None

    def number(self) -> None:
        """Have the ids of events kept: to be called before there are any."""
        self.names = deque()


class Follower:
    """Writes a job's events into its stream, and counts them."""

    def __init__(
        self, job: Job, stream: JobStream, eos_id: int, metrics: NetworkMetrics, begun: Callable[[Job], None],
        ended: Callable[[Job, Event], None],
    ) -> None:
        """`begun`: called when a worker has the job for the first time; `ended`: with its terminal event."""
        self._job, self._stream, self._eos_id, self._metrics = job, stream, eos_id, metrics
        self._begun, self._ended = begun, ended
        self._submitted = time.monotonic()
        self._started = False
        self._last_token: float | None = None  # time.monotonic()
        self._told: list[str] = []  # text
        self._again = ""  # text that was told before the output began again, and has not come a second time yet

    def __call__(self, events: Sequence[Event]) -> None:
        stream, now = self._stream, time.monotonic()
        for place, event in enumerate(events):
            self._count(event, now)
            if stream.done:
                continue
            if event.token is not None:
                last = events[-1] if place == len(events) - 2 and events[-1].end is not None else event
                self._put(event.token, last)
            elif event.end is not None:  # no token tells the end: one that is no text does
                told = len("".join(self._told)) - len(self._again)
                self._put(Token(self._eos_id, 0.0, event.end.text[told:], True), event)
            elif event.kind == "reset":
                self._again = "".join(self._told)
            elif event.kind in TERMINAL:
                stream.fail(_error(event))

    def _count(self, event: Event, now: float) -> None:
        metrics = self._metrics
        if event.token is not None:
            if self._last_token is None:
                metrics.first_token.observe(now - self._submitted)
            elif now > self._last_token:  # tokens that come together have one gap before them
                metrics.gap_at_client.observe(now - self._last_token)
            self._last_token = now
        elif event.kind in TERMINAL:
            metrics.outcomes[event.kind, self._job.request.workload] += 1
            metrics.attempts.observe(event.attempt)
            self._ended(self._job, event)
        elif not self._started:
            self._started = True
            metrics.queue_wait.observe(now - self._submitted)
            self._begun(self._job)

    def _put(self, token: Token, event: Event) -> None:
        """Tell a token, but not again what was told before a reset: an output that differs from that cannot go on.

        `event`: whose id stands for it: its own, or the terminal one, whose end it tells.
        """
        end: End | None = event.end
        if self._again:
            old, new = self._again, token.text
            if not (old.startswith(new) or new.startswith(old)) or (end is not None and len(new) < len(old)):
                text = "its worker was lost, and what another one says differs from what was sent already"
                self._stream.abort(GenerationFailed(text))
                return
            self._again = old[len(new) :]
            if self._again or (len(new) == len(old) and end is None):
                return
            token = replace(token, text=new[len(old) :])
        self._told.append(token.text)
        if self._stream.names is not None:
            self._stream.names.append(event.name)
        self._stream.put(token if end is None else replace(token, end=end))


def _error(event: Event) -> HeadraceError:
    """What the client of an ordinary route is told."""
    if event.kind == "expired":
        return DeadlineExceeded(f"the request did not end in time (the limit of its {event.facts['which']} time)")
    if event.kind == "cancelled":
        return GenerationFailed("the request was cancelled")
    if event.facts.get("code") == NO_CAPACITY:
        return NoCapacity(str(event.facts["message"]), 5.0)
    return GenerationFailed(str(event.facts["message"]))
