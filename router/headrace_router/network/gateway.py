"""The engine over remote workers: requests become jobs of the broker, workers' sessions take them, events come back.

1. `submit` makes a job and a stream, has the broker accept it, and follows its log.
2. `_dispatch` lets sessions with free slots lease the next jobs, the one with most free slots first. It runs when a job
   comes, a slot gets free or a worker joins.
3. `session.Session` turns a worker's frames into tokens and hands them to the broker, which keeps them in the job's log and
   tells them to everyone who follows: the request's own stream, and readers of /v1/requests/ID/events.
4. A session that ends gives its jobs back to the broker; the next worker gets them with the tokens that are in the log.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from headrace._common.errors import DeadlineExceeded, GenerationFailed, HeadraceError, NotFound, QueueFull
from headrace._common.tokenizing import Tokenizer
from headrace_router.network import frames
from headrace_router.network.broker import Broker
from headrace_router.network.jobs import TERMINAL, Event, Holder, Job, JobStatus
from headrace_router.network.output import JobOutput
from headrace_router.network.session import Session
from headrace_router.streams import TokenStream
from headrace_router.tenants import Tenant
from headrace_router.types import GenerateRequest, Token

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.25
CLASS_WEIGHTS = {"chat": 4.0, "agent": 2.0, "document": 1.0}
NO_WORKER = "no worker is connected"


class JobStream(TokenStream):
    """The stream of a request that is a job. `admitted` is done when the broker has accepted or refused it."""

    __slots__ = ("admitted", "job")

    def __init__(self, job: str, on_cancel: Callable[[], None]) -> None:
        super().__init__(on_cancel)
        self.job = job
        self.admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # position in the queue


class _Follower:
    """Writes a job's events into its stream."""

    def __init__(self, stream: JobStream, eos_id: int) -> None:
        self._stream, self._eos_id, self._told = stream, eos_id, 0

    def __call__(self, events: Sequence[Event]) -> None:
        stream = self._stream
        for place, event in enumerate(events):
            if stream.done:
                return
            if event.token is not None:
                last = events[-1].end if place == len(events) - 2 else None
                self._told += len(event.token.text)
                stream.put(event.token if last is None else replace(event.token, end=last))
            elif event.end is not None:  # no token tells the end: one that is no text does
                text = event.end.text[self._told :]
                stream.put(Token(self._eos_id, 0.0, text, True, end=event.end))
            elif event.kind in TERMINAL:
                stream.fail(_error(event))


def _error(event: Event) -> HeadraceError:
    """What the client of an ordinary route is told."""
    if event.kind == "expired":
        return DeadlineExceeded(f"the request did not end in time (the limit of its {event.facts['which']} time)")
    if event.kind == "cancelled":
        return GenerationFailed("the request was cancelled")
    if event.facts.get("code") == "no_capacity":
        return QueueFull(str(event.facts["message"]), 5.0)
    return GenerationFailed(str(event.facts["message"]))


class Gateway:
    """An engine whose requests run on workers."""

    def __init__(
        self, broker: Broker, tokenizer: Tokenizer, eos_ids: Sequence[int], vocab_size: int, no_worker_wait: float
    ) -> None:
        """`no_worker_wait`: seconds without any worker after which requests are refused."""
        self.broker, self.sessions = broker, dict[str, Session]()
        self._tokenizer, self._eos_ids, self._vocab_size = tokenizer, frozenset(eos_ids), vocab_size
        self._eos_id = next(iter(eos_ids), 0)
        self._no_worker_wait = no_worker_wait
        self._last_worker = time.monotonic()
        self._dispatching = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed: str | None = None
        self.id = secrets.token_hex(4)

    # --- the engine's interface ---

    def submit(self, request: GenerateRequest) -> JobStream:
        """Queue a request.

        Raises:
            QueueFull: no worker has been there for too long.
        """
        if self.nobody:
            raise QueueFull(NO_WORKER, 5.0)
        flow = f"{request.tenant.name}/{request.workload}"
        job = Job(secrets.token_hex(16), flow, request.tenant.weight * CLASS_WEIGHTS[request.workload], request)
        stream = JobStream(job.id, lambda: self._later(self.broker.cancel(job.id, "disconnect")))
        if self._closed is not None:
            stream.fail(GenerationFailed(self._closed))
            return stream
        self._later(self._admit(job, stream))
        return stream

    async def _admit(self, job: Job, stream: JobStream) -> None:
        try:
            position = await self.broker.submit(job)
        except QueueFull as error:
            error.retry_after = 1.0
            if not stream.done:
                stream.fail(error)
            stream.admitted.set_exception(error)
            stream.admitted.exception()  # who does not wait for it reads the stream
            return
        if stream.done:  # its reader left before it was here
            await self.broker.cancel(job.id, "disconnect")
        else:
            self.broker.subscribe(job.id, -1, _Follower(stream, self._eos_id))
            await self.dispatch()
        stream.admitted.set_result(position)

    def start(self) -> list[asyncio.Task[None]]:
        """Start the task that watches the clock; it never ends by itself."""
        return [asyncio.create_task(self._sweep(), name="gateway-sweep")]

    async def close(self, reason: str) -> None:
        """End what runs and waits, and say good-bye to the workers."""
        self._closed = reason
        for session in list(self.sessions.values()):
            session.close(1001, reason)
        await self.broker.end_all("shutdown", reason)
        await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self.broker.waiting

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the waiting requests may take."""
        return self.broker.waiting_tokens

    def wait(self, workload: str, tenant: Tenant) -> float:
        """Seconds that a new request will surely be in the queue: none, since flows share it by weight."""
        return 0.0

    @property
    def backlog(self) -> int:
        """Requests in the queue beyond the free slots."""
        return self.waiting - sum(session.free for session in self.sessions.values())

    @property
    def running(self) -> int:
        """Requests at workers."""
        return self.broker.leased

    @property
    def running_tokens(self) -> int:
        """Tokens that the running requests may grow to."""
        outputs = (output for session in self.sessions.values() for output in session.outputs.values())
        return sum(output.lease.job.total_tokens for output in outputs)

    @property
    def nobody(self) -> bool:
        """Has no worker been there for a while?"""
        return not self.sessions and time.monotonic() - self._last_worker >= self._no_worker_wait

    # --- jobs ---

    async def status(self, job: str) -> JobStatus:
        """
        Raises:
            NotFound: there is no such job, or not any more.
        """
        status = await self.broker.status(job)
        if status is None:
            raise NotFound(f"there is no request {job[:64]}, or not any more")
        return status

    def _later(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def dispatch(self) -> None:
        """Hand out waiting jobs while workers have free slots."""
        async with self._dispatching:
            asked = {session.id: session for session in self.sessions.values() if session.free > 0}
            while asked and self.broker.waiting:
                session = max(asked.values(), key=lambda s: s.free)
                leases = await self.broker.lease(session.id, 1)
                for lease in leases:
                    session.start(lease, JobOutput(lease, self._tokenizer, self._eos_ids, self._vocab_size))
                if not leases or session.free <= 0:
                    del asked[session.id]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self.broker.sweep()
            if self.sessions:
                self._last_worker = time.monotonic()
            elif self.nobody:
                await self.broker.refuse_waiting("no_capacity", NO_WORKER)
            await self.dispatch()

    # --- workers ---

    async def serve_worker(
        self, socket: web.WebSocketResponse, codec: frames.Codec, hello: frames.Hello, worker: str, slots: int, lease: float
    ) -> None:
        """One worker's connection, from its welcome to its end."""
        session = Session(
            secrets.token_hex(8), worker, socket, codec, hello, slots, self.broker, self.dispatch
        )
        session.send(frames.Welcome(session.id, self.id, slots, lease_s=lease))
        holder = Holder(session.id, session.model.format, session.model.max_total)

        def revoked(job: str, attempt: int, why: str) -> None:
            session.revoke(job, attempt, why)
            self._later(self.dispatch())

        await self.broker.attach(holder, revoked)
        self.sessions[session.id] = session
        writer = asyncio.create_task(session.write())
        log.info("worker %s (token %s) joined: %s, %d slots", session.id, worker, session.model.format, slots)
        reason = "the connection was lost"
        try:
            await self.dispatch()
            reason = await session.read()
        finally:
            writer.cancel()
            self.sessions.pop(session.id, None)
            self._last_worker = time.monotonic()
            lost = len(session.outputs)
            session.outputs.clear()
            await self.broker.detach(session.id, "disconnect")
            log.info("worker %s left: %s; %d jobs go elsewhere", session.id, reason, lost)
            self._later(self.dispatch())
