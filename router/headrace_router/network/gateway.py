"""The engine over remote workers: requests become jobs of the broker, workers' sessions take them, events come back.

1. `submit` makes a job and a stream, has the broker accept it, and follows its log.
2. `dispatch` lets sessions with free slots lease the next jobs, the one with most free slots first. It runs when a job
   comes, a slot gets free or a worker joins.
3. `session.Session` turns a worker's frames into tokens and hands them to the broker, which keeps them in the job's log and
   tells them to everyone who follows: the request's own stream, and readers of /v1/requests/ID/events.
4. A session that ends gives its jobs back to the broker; the next worker gets them with the tokens that are in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from headrace._common.errors import BrokerUnavailable, GenerationFailed, Gone, HeadraceError, NoCapacity, NotFound, QueueFull
from headrace._common.logs import ORIGIN
from headrace._common.tokenizing import Tokenizer
from headrace_router.network import frames
from headrace_router.network.broker import Broker
from headrace_router.network.job_stream import NO_CAPACITY, Follower, JobStream
from headrace_router.network.jobs import BEGINNING, OPEN, PROBATION, TIERS, Event, Holder, Job, JobStatus, Lease
from headrace_router.network.line import Line
from headrace_router.network.metrics import NetworkMetrics
from headrace_router.network.names import Names, call_name
from headrace_router.network.output import JobOutput
from headrace_router.network.probation import PROBES, make_probe, probe
from headrace_router.network.session import Session
from headrace_router.network.speed import Use
from headrace_router.network.text_output import TextOutput, needs
from headrace_router.tenants import Tenant
from headrace_router.types import GenerateRequest

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.25
CLOSE_SECONDS = 2.0  # for what the broker is to be told at the end
HOPE_SECONDS = 1.0  # between looks for requests that nobody can serve
RETRY_SECONDS = (1.0, 60.0)  # that a client who is turned away is told to wait, at least and at most
CLASS_WEIGHTS = {"chat": 4.0, "agent": 2.0, "document": 1.0}


@dataclass(frozen=True)
class Terms:
    """On which a worker joins: who it is, how far it is trusted, what it may get at most, and the model in demand."""

    worker: str  # id of its token
    tier: str
    slots: int
    model: str

    @property
    def is_stranger(self) -> bool:
        """Does it have to answer probes first?"""
        return self.tier == "open"

    @property
    def first_slots(self) -> int:
        """Slots that it begins with."""
        return 1 if self.is_stranger else self.slots


class Gateway:
    """An engine whose requests run on workers."""

    def __init__(
        self, broker: Broker, tokenizer: Tokenizer, eos_ids: Sequence[int], vocab_size: int, no_worker_wait: float
    ) -> None:
        """`no_worker_wait`: seconds without a worker that could serve a request, after which it is refused."""
        self.broker, self.sessions, self.metrics, self.names = broker, dict[str, Session](), NetworkMetrics(), Names()
        self._tokenizer, self._eos_ids, self._vocab_size = tokenizer, frozenset(eos_ids), vocab_size
        self._eos_id = next(iter(eos_ids), 0)
        self._leading = tokenizer.encode("")  # what it puts before every text
        self._no_worker_wait = no_worker_wait
        self._began = time.monotonic()
        self._seen: dict[str, tuple[float, Holder]] = {}  # workers, and when they were last there
        self._waiting: dict[str, Job] = {}  # jobs from here that no worker has had
        self._use = Use()
        self._readers: Counter[str] = Counter()  # of each job's events
        self._dispatching = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._streams: weakref.WeakSet[JobStream] = weakref.WeakSet()
        self._closed: str | None = None
        self.id = secrets.token_hex(4)

    # --- the engine's interface ---

    def submit(self, request: GenerateRequest) -> JobStream:
        """Queue a request. The X-Request-Id of the call that it came with is a name of the job; one made here is its id.

        Raises:
            NoCapacity: no worker that could ever serve it is there, or has been for a while.
        """
        tenant, origin, name = request.tenant, ORIGIN.get(), call_name()
        own = origin is not None and origin.made and name == origin.request_id
        job = Job(
            name if own and name is not None else secrets.token_hex(16), f"{tenant.name}/{request.workload}",
            tenant.weight * CLASS_WEIGHTS[request.workload], request, needs(request, self._leading),
            TIERS[request.min_tier], origin=origin,
        )
        if not self._is_hopeful(job):
            raise NoCapacity(self._lack(job), 5.0)
        stream = JobStream(job.id, lambda: self._given_up(stream))
        if self._closed is not None:
            stream.fail(GenerationFailed(self._closed))
            return stream
        self._streams.add(stream)
        self._later(self._admit(job, stream, {job.id, name or job.id}))
        return stream

    def _given_up(self, stream: JobStream) -> None:
        if self._closed is None or not stream.kept:
            self._later(self.broker.cancel(stream.job, "disconnect"))

    async def _admit(self, job: Job, stream: JobStream, names: set[str]) -> None:
        try:
            position = await self.broker.submit(job)
        except QueueFull as error:
            error.retry_after = self._turn()
            if not stream.done:
                stream.fail(error)
            stream.admitted.set_exception(error)
            stream.admitted.exception()  # who does not wait for it reads the stream
            return
        for name in names:
            self.names.add(job.request.tenant.name, name, job.id)
        if stream.done:  # its reader left before it was here
            await self.broker.cancel(job.id, "disconnect")
        self._waiting[job.id] = job
        await self._follow(job, stream)
        stream.admitted.set_result(position)
        await self.dispatch()

    async def _follow(self, job: Job, stream: JobStream) -> None:
        follower = Follower(job, stream, self._eos_id, self.metrics, self._begun, self._job_ended)
        try:
            await self.broker.subscribe(job.id, BEGINNING, follower)
        except HeadraceError as error:
            self._begun(job)
            if not stream.done:
                stream.fail(error)

    def _begun(self, job: Job) -> None:
        self._waiting.pop(job.id, None)

    def _job_ended(self, job: Job, event: Event) -> None:
        self._waiting.pop(job.id, None)
        if event.end is not None:
            self._use.ended(event.end.input_length + event.end.generated_tokens, job.total_tokens)

    def start(self) -> list[asyncio.Task[None]]:
        """Start the task that watches the clock; it never ends by itself."""
        def on_work() -> None:
            self._later(self.dispatch())

        self.broker.on_work = on_work
        return [asyncio.create_task(self._sweep(), name="gateway-sweep")]

    async def close(self, reason: str) -> None:
        """End what runs and waits, and say good-bye to the workers."""
        self._closed = reason
        for session in list(self.sessions.values()):
            session.close(1001, reason)
        if self.broker.durable:  # its jobs go on elsewhere; who listens to them here is told
            for stream in list(self._streams):
                stream.abort(GenerationFailed(reason))
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        await self.broker.close(reason)
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
    def live(self) -> int:
        """Requests that were accepted and have not ended."""
        return self.broker.waiting + self.broker.leased

    @property
    def running_tokens(self) -> int:
        """Tokens that the running requests may grow to."""
        outputs = (output for session in self.sessions.values() for output in session.outputs.values())
        return sum(output.lease.job.total_tokens for output in outputs)

    # --- who can serve, and when ---

    def _is_hopeful(self, job: Job) -> bool:
        """Is a worker there that could serve it, or was there a moment ago? One may always come in the first moment."""
        if any(holder.fits(job) for holder in self.broker.holders):
            return True
        since = time.monotonic() - self._no_worker_wait
        return self._began > since or any(seen > since and holder.fits(job) for seen, holder in self._seen.values())

    def _lack(self, job: Job) -> str:
        """Why nobody can serve a job."""
        if not self.broker.holders:
            return "no worker is connected"
        asked = f" and has {', '.join(sorted(job.needs))}" if job.needs else ""
        tier = "" if job.min_tier == OPEN else f" of tier {job.request.min_tier}"
        return f"no connected worker{tier} takes a request of {job.total_tokens} tokens{asked}"

    async def _refuse_hopeless(self) -> None:
        now = time.monotonic()
        self._seen = {name: row for name, row in self._seen.items() if now - row[0] < self._no_worker_wait}
        self._seen |= {holder.session: (now, holder) for holder in self.broker.holders}
        for job in list(self._waiting.values()):
            if not self._is_hopeful(job):
                await self.broker.refuse(job.id, NO_CAPACITY, self._lack(job))

    def eta(self, status: JobStatus) -> float | None:
        """Seconds until a waiting job begins: what is before it, by the speed of the workers that could serve it.

        None: it does not wait, or nothing has been measured yet.
        """
        able = [session for session in self.sessions.values() if session.holder.fits(status.job)]
        speed = sum(session.speed for session in able)
        if status.position is None or not speed:
            return None
        ahead = status.position * self.waiting_tokens / max(self.waiting, 1) * self._use.share
        return round(ahead / speed + min(self._until_free(session) for session in able if session.speed), 1)

    def _until_free(self, session: Session) -> float:
        """Seconds until a session has a free slot, by what its requests are expected to produce."""
        if session.free or not session.outputs:
            return 0.0
        left = min(o.lease.job.request.max_new_tokens * self._use.share - o.length for o in session.outputs.values())
        return max(left, 0.0) * len(session.outputs) / session.speed

    def _turn(self) -> float:
        """Seconds until the queue may have moved by one request."""
        speed = sum(session.speed for session in self.sessions.values())
        mean = self.waiting_tokens / max(self.waiting, 1) * self._use.share
        return min(max(mean / speed, RETRY_SECONDS[0]), RETRY_SECONDS[1]) if speed else RETRY_SECONDS[0]

    # --- jobs ---

    async def find(self, tenant: str, name: str) -> tuple[str, JobStatus]:
        """A tenant's job by its id or by the X-Request-Id of its call, and how it is.

        Raises:
            NotFound: the tenant has no such request, that is known here.
            Gone: it has ended so long ago that it is not kept any more.
        """
        job = self.names.find(tenant, name)
        status = await self.broker.status(job or name)
        if status is None and job is not None:
            raise Gone(f"the request {name[:64]} has ended, and is not kept any more")
        if status is None or status.job.request.tenant.name != tenant:
            raise NotFound(f"there is no request {name[:64]}")
        return job or name, status

    @contextlib.contextmanager
    def reading(self, job: str) -> Iterator[None]:
        """Somebody reads the job's events."""
        self._readers[job] += 1
        self.metrics.readers += 1
        try:
            yield
        finally:
            self.metrics.readers -= 1
            self._readers[job] -= 1
            if not self._readers[job]:
                del self._readers[job]

    def is_read(self, job: str) -> bool:
        """Does anybody read the job's events?"""
        return job in self._readers

    def _later(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s", error)

    async def dispatch(self) -> None:
        """Hand out waiting jobs while workers have free slots, and room for them."""
        async with self._dispatching:
            asked = {session.id: session for session in self.sessions.values() if session.free > 0}
            while asked and self.broker.waiting:
                session = max(asked.values(), key=lambda s: s.free)
                leases = await self.broker.lease(session.id, 1, session.room(self._use.share))
                for lease in leases:
                    session.start(lease, self._output(session, lease))
                if not leases or session.free <= 0:
                    del asked[session.id]

    def _output(self, session: Session, lease: Lease) -> JobOutput | TextOutput:
        if session.speaks_text:
            return TextOutput(lease, self._tokenizer, self._leading, self._eos_id, self._vocab_size)
        return JobOutput(lease, self._tokenizer, self._eos_ids, self._vocab_size)

    async def _sweep(self) -> None:
        pinged = looked = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.monotonic()
            await self.broker.sweep()
            with contextlib.suppress(BrokerUnavailable):  # the broker says so, and sees to those who wait
                if now - looked >= HOPE_SECONDS:
                    looked = now
                    await self._refuse_hopeless()
                for session in list(self.sessions.values()):
                    await session.sweep()
                    if now - pinged >= frames.HEARTBEAT:
                        session.ping()
                pinged = now if now - pinged >= frames.HEARTBEAT else pinged
                await self.dispatch()

    # --- workers ---

    async def serve_worker(
        self, socket: web.WebSocketResponse, abort: Callable[[], None], codec: frames.Codec, hello: frames.Hello, terms: Terms,
        lease: float,
    ) -> None:
        """One worker's connection, from its welcome to its end. `abort`: cuts the socket."""
        name = secrets.token_hex(8)
        line = Line(name, socket, codec, abort)
        session = Session(name, terms.worker, line, hello, terms.first_slots, self.broker, self.metrics, self.dispatch)
        session.holder = replace(session.holder, tier=PROBATION if terms.is_stranger else TIERS[terms.tier])

        def welcome() -> None:
            line.send(frames.Welcome(name, self.id, session.slots, lease_s=lease, tier=session.tier, models=[terms.model]))

        welcome()

        def revoked(job: str, attempt: int, why: str) -> None:
            session.revoke(job, attempt, why)
            self._later(self.dispatch())

        try:
            await self.broker.attach(session.holder, revoked)
        except BrokerUnavailable as error:
            await socket.close(code=1013, message=str(error).encode())
            return
        self.sessions[name] = session
        self._seen[name] = (time.monotonic(), session.holder)
        log.info(
            "worker %s (token %s, %s) joined: %s, %d slots", name, terms.worker, session.tier, session.model.format,
            session.slots,
        )
        reason = "the connection was lost"

        async def examine() -> None:
            for _ in range(PROBES):
                wrong = await probe(self.broker, name, make_probe(self._tokenizer))
                if wrong is not None:
                    session.close(4403, f"a probe failed: {wrong}")
                    return
            session.slots, session.holder = terms.slots, replace(session.holder, tier=OPEN)
            await self.broker.attach(session.holder, revoked)
            welcome()
            log.info("worker %s has answered its probes: %d slots", name, session.slots)
            await self.dispatch()

        examining = self._later(examine()) if terms.is_stranger else None
        try:
            await self.dispatch()
            reason = await session.run()
        except BrokerUnavailable as error:  # its jobs go on where the broker is seen again
            reason = str(error)
            session.close(1013, reason)
            await line.closed()
        finally:
            if examining is not None:
                examining.cancel()
            del self.sessions[name]
            self._seen[name] = (time.monotonic(), session.holder)
            self.metrics.unknown_frames += line.unknown
            self.metrics.malformed_frames += line.malformed
            lost = len(session.outputs)
            session.outputs.clear()
            await self.broker.detach(name, "disconnect")
            log.info("worker %s left: %s; %d jobs go elsewhere", name, reason, lost)
            self._later(self.dispatch())
