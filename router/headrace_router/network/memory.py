"""`memory://`: the broker within the gateway's process. What it keeps ends with the process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace._common.errors import Conflict, NotFound, QueueFull
from headrace_router.network.broker import Listener, Revoked
from headrace_router.network.fair_queue import FairQueue, Key
from headrace_router.network.jobs import (
    TERMINAL,
    WINDOW,
    Counts,
    Event,
    EventId,
    Holder,
    Job,
    JobStatus,
    Lease,
    Policy,
    Progress,
    State,
)
from headrace_router.tenants import CLASSES

CLAIM_SECONDS = 0.02  # between looks at a key that somebody else makes a job for


class _Record:
    """All that is known of one job."""

    def __init__(self, job: Job, key: Key, now: float, policy: Policy) -> None:
        self.job, self.key = job, key
        self.state: State = "queued"
        self.attempt = 0
        self.session: str | None = None  # the holder of the lease
        self.excluded: set[str] = set()  # sessions that have failed it
        self.weight_format: str | None = None  # of the worker that said its first token
        self.exact = True  # others can go on after the output exactly
        self.log: list[Event] = []
        self.output: list[int] = []
        self.listeners: dict[int, Listener] = {}
        self.submitted = now
        self.leased: float | None = None  # first lease
        self.deadline = now + policy.max_queue_time  # of waiting, then of running
        self.lease_ends = 0.0
        self.keys: list[str] = []  # idempotency keys that lead here

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL


class MemoryBroker:
    """Dictionaries and a sorted queue; see `broker.Broker` for the rules."""

    durable = False

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._records: dict[str, _Record] = {}
        self._live: dict[str, _Record] = {}  # those that have not ended
        self._queue = FairQueue()
        self._waiting_tokens = 0
        self.waiting_by_class = dict.fromkeys(CLASSES, 0)
        self._holders: dict[str, tuple[Holder, Revoked, dict[str, _Record]]] = {}
        self._gone: list[tuple[float, str]] = []  # ended jobs, by the time until which they are kept
        self._listeners = itertools.count()
        self._claims: dict[str, tuple[str, str | None]] = {}  # idempotency key -> (digest, job)
        self._tenants: Counter[str] = Counter()  # jobs that have not ended
        self.on_work: Callable[[], None] = lambda: None  # there is nobody else who could bring work
        self.counts = Counts()

    async def start(self, patience: float) -> None:
        """There is nothing to reach."""

    @property
    def problem(self) -> str | None:
        return None

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        return self._waiting_tokens

    @property
    def leased(self) -> int:
        return sum(len(held) for _, _, held in self._holders.values())

    # --- clients ---

    async def submit(self, job: Job) -> int:
        most, tokens = self._policy.max_queue_tokens, self._waiting_tokens + job.total_tokens
        if len(self._queue) >= self._policy.max_queue_size or (most is not None and self._queue and tokens > most):
            raise QueueFull("Model is overloaded: the queue is full")
        key = self._queue.score(job.id, job.flow, job.cost / job.weight)
        self._records[job.id] = self._live[job.id] = _Record(job, key, self._clock(), self._policy)
        self._wait(self._records[job.id])
        self.counts.accepted += 1
        self._tenants[job.request.tenant.name] += 1
        return self._queue.position(key)

    async def claim(self, key: str, digest: str) -> str | None:
        while True:
            known = self._claims.get(key)
            if known is None:
                self._claims[key] = (digest, None)
                return None
            if known[0] != digest:
                raise Conflict("this Idempotency-Key was used for another request")
            if known[1] is not None:
                return known[1]
            await asyncio.sleep(CLAIM_SECONDS)

    async def settle(self, key: str, job: str | None) -> None:
        if job is not None and (record := self._records.get(job)) is not None:
            self._claims[key] = (self._claims[key][0], job)
            record.keys.append(key)
        else:
            del self._claims[key]

    async def live(self, tenant: str) -> int:
        return self._tenants[tenant]

    async def cancel(self, job: str, by: str) -> bool:
        record = self._records.get(job)
        if record is None or record.ended:
            return False
        self._end(record, "cancelled", {"by": by}, revoke=by)
        return True

    async def status(self, job: str) -> JobStatus | None:
        record = self._records.get(job)
        if record is None:
            return None
        position = self._queue.position(record.key) if record.state == "queued" else None
        return JobStatus(
            record.job, record.state, record.attempt, len(record.output), position, record.log[-1] if record.ended else None
        )

    async def subscribe(self, job: str, after: EventId, listener: Listener) -> Callable[[], None]:
        record = self._records.get(job)
        if record is None:
            raise NotFound(f"there is no request {job[:64]}, or not any more")
        number = next(self._listeners)
        record.listeners[number] = listener
        if events := record.log[after[1] + 1 :]:
            listener(events)
        return lambda: record.listeners.pop(number, None) and None

    # --- workers ---

    async def attach(self, holder: Holder, revoked: Revoked) -> None:
        known = self._holders.get(holder.session)
        self._holders[holder.session] = (holder, revoked, known[2] if known is not None else {})

    async def detach(self, session: str, reason: str) -> None:
        found = self._holders.pop(session, None)
        for record in list(found[2].values()) if found is not None else []:
            self._requeue(record, reason)

    @property
    def holders(self) -> list[Holder]:
        return [holder for holder, _, _ in self._holders.values()]

    async def lease(self, session: str, most: int, tokens: int | None = None) -> list[Lease]:
        holder, _, held = self._holders[session]
        made: list[Lease] = []
        window = [self._records[job] for job in itertools.islice(self._queue, WINDOW + most)]
        for record in window:
            if len(made) >= most:
                break
            if not self._may_run(holder, record):
                continue
            if tokens is not None:
                if record.job.total_tokens > tokens:
                    break
                tokens -= record.job.total_tokens
            self._queue.take(record.key)
            self._count(record, -1)
            now = self._clock()
            record.attempt += 1
            record.state, record.session = "leased", session
            if record.leased is None:
                record.leased = now
                record.deadline = now + self._policy.max_run_time
            record.lease_ends = self._first_lease(record, now)
            held[record.job.id] = record
            kind = "resumed" if record.output else "started"
            if record.output and not (record.exact and holder.resumes):
                kind, record.output, record.weight_format, record.exact = "reset", [], None, True
            self.counts.resumed_tokens += len(record.output)
            self._append(record, [self._event(record, kind, facts={"from_index": len(record.output)})])
            made.append(Lease(record.job, record.attempt, tuple(record.output), record.leased - record.submitted))
        return made

    def _may_run(self, holder: Holder, record: _Record) -> bool:
        if not holder.fits(record.job):
            return False
        exact = record.exact and holder.resumes  # else it begins again, in whatever format
        if exact and record.weight_format not in (None, holder.weight_format):
            return False
        only = record.job.only is not None
        return only or holder.session not in record.excluded or self._holders.keys() <= record.excluded

    def _first_lease(self, record: _Record, now: float) -> float:
        prompt = len(record.job.request.prompt) + len(record.output)
        return now + self._policy.lease + prompt * self._policy.prompt_token

    async def progress(self, news: Sequence[Progress]) -> list[bool]:
        return [self._progress(one) for one in news]

    def _progress(self, news: Progress) -> bool:
        record = self._current(news.job, news.attempt)
        if record is None:
            return False
        output, attempt = record.output, record.attempt
        known = len(output) - news.index
        if known < 0:
            self._requeue(record, "gap", exclude=True)
            return False
        fresh, seq, index = news.tokens[known:], len(record.log), len(output)
        events = [Event("token", attempt, seq + k, index + k, token) for k, token in enumerate(fresh)]
        output += [token.id for token in fresh]
        if events:
            record.lease_ends = self._clock() + self._policy.stall
            if record.weight_format is None and record.session is not None:
                holder = self._holders[record.session][0]
                record.weight_format, record.exact = holder.weight_format, holder.resumes
        if news.end is not None:
            self._end(record, "done", {}, events=events, end=news.end)
        elif events:
            self._append(record, events)
        return True

    async def renew(self, session: str, held: Sequence[tuple[str, int]]) -> None:
        for job, attempt in held:
            record = self._records.get(job)
            if record is None or record.session != session or record.attempt != attempt:
                continue
            if record.log[-1].kind != "token":
                record.lease_ends = max(record.lease_ends, self._first_lease(record, self._clock()))

    async def release(self, job: str, attempt: int, reason: str) -> bool:
        record = self._current(job, attempt)
        if record is not None:
            self._requeue(record, reason, exclude=True)
        return record is not None

    async def fail(self, job: str, attempt: int, code: str, message: str) -> bool:
        record = self._current(job, attempt)
        if record is not None:
            self._end(record, "failed", {"code": code, "message": message, "retriable": False})
        return record is not None

    # --- time ---

    async def sweep(self) -> None:
        now = self._clock()
        for record in list(self._live.values()):
            if now >= record.deadline:
                which = "queue" if record.leased is None else "run"
                self._end(record, "expired", {"which": which}, revoke="deadline")
            elif record.state == "leased" and now >= record.lease_ends:
                self._revoke(record, "stale")
                self._requeue(record, "lease", exclude=True)
        while self._gone and self._gone[0][0] <= now:
            for key in self._records.pop(self._gone.pop(0)[1]).keys:
                del self._claims[key]

    async def refuse(self, job: str, code: str, message: str) -> bool:
        record = self._live.get(job)
        if record is None or record.leased is not None:
            return False
        self._end(record, "failed", {"code": code, "message": message, "retriable": True})
        return True

    async def close(self, reason: str) -> None:
        for record in list(self._live.values()):
            self._end(record, "failed", {"code": "shutdown", "message": reason, "retriable": True}, revoke="shutdown")

    # --- transitions ---

    def _current(self, job: str, attempt: int) -> _Record | None:
        record = self._records.get(job)
        if record is None or record.state != "leased" or record.attempt != attempt:
            self.counts.stale_frames += 1
            return None
        return record

    def _requeue(self, record: _Record, reason: str, exclude: bool = False) -> None:
        session = record.session
        self._let_go(record)
        if exclude and session is not None:
            record.excluded.add(session)
        if record.attempt >= self._policy.max_attempts:
            text = f"{record.attempt} workers were lost or failed with this request; the last one: {reason}"
            self._end(record, "failed", {"code": "attempts_exhausted", "message": text, "retriable": False})
            return
        self.counts.redeliveries[reason] = self.counts.redeliveries.get(reason, 0) + 1
        record.state = "queued"
        self._wait(record)

    def _wait(self, record: _Record) -> None:
        self._queue.push(record.key)
        self._count(record, 1)

    def _count(self, record: _Record, by: int) -> None:
        """A job waits, or waits no more."""
        self._waiting_tokens += by * record.job.total_tokens
        self.waiting_by_class[record.job.request.workload] += by

    def _let_go(self, record: _Record) -> None:
        if record.session is not None and (found := self._holders.get(record.session)) is not None:
            found[2].pop(record.job.id, None)
        record.session = None

    def _revoke(self, record: _Record, reason: str) -> None:
        if record.session is not None and (found := self._holders.get(record.session)) is not None:
            found[1](record.job.id, record.attempt, reason)

    def _end(
        self, record: _Record, kind: State, facts: dict[str, Any], events: Iterable[Event] = (), end: Any = None,
        revoke: str | None = None,
    ) -> None:
        """The terminal transition."""
        if revoke is not None:
            self._revoke(record, revoke)
        if record.state == "queued":
            self._queue.drop(record.key)
            self._count(record, -1)
        self._let_go(record)
        record.state = kind
        del self._live[record.job.id]
        tenant = record.job.request.tenant.name
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        self.counts.outcomes[kind] += 1
        job, used = record.job, len(record.job.request.prompt) + 2 * len(record.output)
        self._queue.correct(job.flow, (used - job.cost) / job.weight)
        before = list(events)
        self._append(record, [*before, self._event(record, kind, end=end, facts=facts, after=len(before))])
        record.listeners.clear()
        self._gone.append((self._clock() + self._policy.retention, job.id))

    def _event(self, record: _Record, kind: str, after: int = 0, **more: Any) -> Event:
        return Event(kind, record.attempt, len(record.log) + after, **more)

    def _append(self, record: _Record, events: list[Event]) -> None:
        record.log += events
        if record.listeners:
            for listener in list(record.listeners.values()):
                listener(events)
