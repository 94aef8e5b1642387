"""`redis://` and its kin: the broker in a Redis or Valkey server, which several gateways may share and which outlives them.

The transitions are `broker.lua`. Here is what one gateway knows beside that: its sessions, who reads which log, and the jobs
that it has brought, to bring them again if the server has lost everything.

Tokens that this gateway's workers bring go to its readers as soon as the server has them. All else comes by hints, and by a
look at every log that is read here, once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from headrace._common.errors import BrokerUnavailable, Conflict, NotFound, QueueFull
from headrace_router.metrics import DURATIONS, Histogram
from headrace_router.network.broker import Listener, Revoked
from headrace_router.network.jobs import (
    BEGINNING,
    TERMINAL,
    Counts,
    Event,
    EventId,
    Holder,
    Job,
    JobStatus,
    Lease,
    Policy,
    Progress,
)
from headrace_router.network.records import encode, entry_of, event_of, facts_of, listed, packed, read_holder, read_job, to_json
from headrace_router.network.store import Store
from headrace_router.tenants import CLASSES

log = logging.getLogger(__name__)

CLAIM_SECONDS = 0.05  # between looks at a key that somebody else makes a job for
TICK_SECONDS = 1.0  # between looks at every log that is read here
LOST_SECONDS = 5.0  # until a request that the server has lost is not waited for



class _Reader:
    """Somebody who hears a job's events, up to `after` so far."""

    def __init__(self, after: EventId, listener: Listener) -> None:
        self.after, self._listener = after, listener

    def hear(self, events: Sequence[Event]) -> bool:
        """Take events that follow each other; those that are known are passed over. False: some before them are missing."""
        known = self.after[1] + 1 - events[0].seq
        if known < 0:
            return False
        if fresh := events[known:]:
            self.after = fresh[-1].id
            self._listener(fresh)
        return True


class SharedBroker:
    """See `broker.Broker` for the rules."""

    durable = True

    def __init__(
        self, url: str, policy: Policy, namespace: str, clock: Callable[[], float] | None = None, grace: float = 30.0
    ) -> None:
        """`namespace`: gateways with the same one share their jobs; `clock`: in seconds, in place of the server's;
        `grace`: seconds that the server may be away before what waits for it ends.

        Raises:
            StartupError: the URL is none.
        """
        self.gateway = secrets.token_hex(8)
        self._store = Store(url, f"{{wn:{namespace}}}", self.gateway, policy, clock, grace)
        self._sessions: dict[str, tuple[Holder, Revoked, dict[str, int]]] = {}  # what they hold: job -> attempt
        self._readers: dict[str, list[_Reader]] = {}
        self._own: dict[str, tuple[Job, list[Event]]] = {}  # jobs that were brought here and have not ended
        self._claims: dict[str, str] = {}  # idempotency keys that are being used here -> digest
        self._formats: dict[str, str] = {}  # of the exact outputs of jobs at workers here
        self._epoch: bytes | None = None  # of the store's content
        self._version = -1  # of the sessions of all gateways
        self._waiting = self._waiting_tokens = self._leased = 0
        self.op_seconds = defaultdict[str, Histogram](lambda: Histogram(DURATIONS))
        self._leasing = asyncio.Lock()
        self._due: set[str] = set()  # jobs whose logs have news
        self._fresh = asyncio.Event()
        self._missing: dict[str, float] = {}  # jobs that are read here and are not there, since time.monotonic()
        self._ticked = 0.0  # time.monotonic()
        self._reconciled = 0  # faults of the store that were seen to
        self._tasks: set[asyncio.Task[None]] = set()
        self.waiting_by_class = dict.fromkeys(CLASSES, 0)
        self.holders: Collection[Holder] = ()
        self.problem: str | None = None
        self.on_work: Callable[[], None] = lambda: None
        self.counts = Counts()

    async def start(self, patience: float) -> None:
        await self._store.open(patience)
        await self._ask("sweep")
        self._spawn(self._store.hints(self._hint, self._look_at_all))
        self._spawn(self._fetch())

    async def close(self, reason: str) -> None:
        with contextlib.suppress(BrokerUnavailable):
            await self._ask("leave", patient=False)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store.close()

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def waiting_tokens(self) -> int:
        return self._waiting_tokens

    @property
    def leased(self) -> int:
        return self._leased

    # --- clients ---

    async def submit(self, job: Job) -> int:
        outcome = await self._ask("submit", *facts_of(job), patient=False)
        if outcome[0] == b"full":
            raise QueueFull("Model is overloaded: the queue is full")
        self._adopt(job)
        return int(outcome[1])

    def _adopt(self, job: Job) -> None:
        events: list[Event] = []
        self._own[job.id] = (job, events)

        def hear(news: Sequence[Event]) -> None:
            events.extend(news)
            if news[-1].kind in TERMINAL:
                self._own.pop(job.id, None)
                self._formats.pop(job.id, None)

        self._readers.setdefault(job.id, []).append(_Reader(BEGINNING, hear))

    async def claim(self, key: str, digest: str) -> str | None:
        while True:
            found = bytes(await self._ask("claim", key, digest, patient=False)).decode()
            if found == "conflict":
                raise Conflict("this Idempotency-Key was used for another request")
            if found == "mine":
                self._claims[key] = digest
                return None
            if found != "pending":
                return found.removeprefix("job ")
            await asyncio.sleep(CLAIM_SECONDS)

    async def settle(self, key: str, job: str | None) -> None:
        await self._ask("settle", key, self._claims.pop(key), job or "")

    async def cancel(self, job: str, by: str) -> bool:
        return bool(await self._ask("cancel", job, by, patient=by != "user"))

    async def status(self, job: str) -> JobStatus | None:
        found = await self._ask("status", job, patient=False)
        if not found:
            return None
        state, attempt, tokens, position, payload, last = found
        return JobStatus(
            read_job(payload), state.decode(), attempt, tokens, position if position >= 0 else None,
            event_of(last) if last else None,
        )

    async def subscribe(self, job: str, after: EventId, listener: Listener) -> Callable[[], None]:
        reader = _Reader(after, listener)
        self._readers.setdefault(job, []).append(reader)

        def leave() -> None:
            readers = self._readers.get(job, [])
            if reader in readers:
                readers.remove(reader)
            if not readers:
                self._readers.pop(job, None)

        try:
            if await self._read([job]):
                raise NotFound(f"there is no request {job[:64]}, or not any more")
        except BaseException:  # refused, or given up while it waits
            leave()
            raise
        return leave

    async def live(self, tenant: str) -> int:
        return int(await self._ask("live", tenant, patient=False))

    async def refuse(self, job: str, code: str, message: str) -> bool:
        return bool(await self._ask("refuse", job, to_json({"code": code, "message": message, "retriable": True})))

    # --- workers ---

    async def attach(self, holder: Holder, revoked: Revoked) -> None:
        known = self._sessions.get(holder.session)
        await self._attach(holder)
        self._sessions[holder.session] = (holder, revoked, known[2] if known is not None else {})

    async def _attach(self, holder: Holder) -> None:
        features = "*" if holder.features is None else listed(holder.features)
        await self._ask(
            "attach", holder.session, holder.weight_format, holder.max_total_tokens, holder.tier, features,
            int(holder.resumes), encode(holder),
        )

    async def detach(self, session: str, reason: str) -> None:
        self._sessions.pop(session, None)
        with contextlib.suppress(BrokerUnavailable):  # seen to when the server is back
            await self._ask("detach", session, reason)

    async def lease(self, session: str, most: int, tokens: int | None = None) -> list[Lease]:
        async with self._leasing:
            if session not in self._sessions:
                return []
            room = -1 if tokens is None else tokens
            found = await self._ask("lease", session, most, room)
            if found is None:  # others took this gateway for dead, and gave away what its workers had
                await self._attach_again(session)
                found = await self._ask("lease", session, most, room)
            return [self._leased_to(session, row) for row in found or ()]

    def _leased_to(self, session: str, row: list[Any]) -> Lease:
        _, attempt, payload, seconds, entries = row
        holder, _, held = self._sessions[session]
        job = read_job(payload)
        generated: list[int] = []
        for entry in entries:  # the last one first
            event = event_of(entry)
            if event.kind == "reset":
                break
            if event.token is not None:
                generated.append(event.token.id)
        held[job.id] = attempt
        if holder.resumes and job.id in self._own:
            self._formats[job.id] = holder.weight_format
        return Lease(job, attempt, tuple(reversed(generated)), float(seconds) / 1000)

    async def progress(self, news: Sequence[Progress]) -> list[bool]:
        args: list[Any] = [len(news)]
        for one in news:
            end = "" if one.end is None else encode(one.end)
            args += [one.job, one.attempt, one.index, end, len(one.tokens), *map(packed, one.tokens)]
        outcomes = await self._ask("progress", *args)
        for one, outcome in zip(news, outcomes, strict=True):
            if outcome[0]:
                self._forward(one, *outcome[1:])
            if not outcome[0] or one.end is not None:
                self._forget(one.job, one.attempt)
        return [bool(outcome[0]) for outcome in outcomes]

    def _forward(self, news: Progress, seq: int, known: int) -> None:
        """What is in the log now goes to who reads it here."""
        if news.job not in self._readers:
            return
        fresh = news.tokens[known:]
        events = [
            Event("token", news.attempt, seq + k, news.index + known + k, token) for k, token in enumerate(fresh)
        ]
        if news.end is not None:
            events.append(Event("done", news.attempt, seq + len(fresh), end=news.end))
        if events:
            self._tell(news.job, events)

    async def renew(self, session: str, held: Sequence[tuple[str, int]]) -> None:
        if held:
            await self._ask("renew", session, len(held), *(part for pair in held for part in pair))

    async def release(self, job: str, attempt: int, reason: str) -> bool:
        self._forget(job, attempt)
        return bool(await self._ask("release", job, attempt, reason))

    async def fail(self, job: str, attempt: int, code: str, message: str) -> bool:
        self._forget(job, attempt)
        facts = {"code": code, "message": message, "retriable": False}
        return bool(await self._ask("fail", job, attempt, to_json(facts)))

    def _forget(self, job: str, attempt: int) -> None:
        """A session does not hold a job any more."""
        for _, _, held in self._sessions.values():
            if held.get(job) == attempt:
                del held[job]

    # --- time ---

    async def sweep(self) -> None:
        try:
            await self._ask("sweep")
        except BrokerUnavailable as error:
            if self.problem is None:
                log.error("the broker %s has been away for too long: requests end", self._store.name)
                self.problem = str(error)
                self._give_up(str(error))
            return
        self.problem = None
        if (faults := self._store.faults) != self._reconciled:
            with contextlib.suppress(BrokerUnavailable):
                await self._reconcile()
                self._reconciled = faults
        now = time.monotonic()
        if now - self._ticked >= TICK_SECONDS:
            self._ticked = now
            self._look_at_all()

    def _give_up(self, reason: str) -> None:
        """Tell everybody who reads here that there will be no more."""
        for job in list(self._readers):
            self._end_here(job, "broker_unavailable", reason)

    def _end_here(self, job: str, code: str, message: str) -> None:
        """Readers here are told an end that no log has."""
        for reader in self._readers.pop(job, ()):
            attempt, seq = reader.after
            facts = {"code": code, "message": message, "retriable": True}
            reader.hear([Event("failed", attempt, seq + 1, facts=facts)])

    async def _reconcile(self) -> None:
        """What the server says of our sessions may be wrong, where an answer was lost or it has lost everything."""
        async with self._leasing:
            held = [part for _, _, jobs in self._sessions.values() for pair in jobs.items() for part in pair]
            sessions = list(self._sessions)
            for session in await self._ask("reconcile", len(sessions), *sessions, len(held) // 2, *held):
                await self._attach_again(session.decode())

    async def _attach_again(self, session: str) -> None:
        """The server does not know a session of ours any more, nor that it holds anything."""
        if (entry := self._sessions.get(session)) is not None:
            holder, revoked, held = entry
            for job, attempt in list(held.items()):
                revoked(job, attempt, "stale")
            held.clear()
            await self._attach(holder)

    async def _restore(self) -> None:
        """The server has lost everything: our jobs and sessions are made again, and who holds a job lets go of it."""
        log.warning("the broker %s has lost what it kept: %d requests are brought again", self._store.name, len(self._own))
        try:
            await self._reconcile()
            for own, events in list(self._own.values()):
                await self._bring_again(own, events)
        except BrokerUnavailable:
            self._epoch = b""  # all of it again, when the server is back
        self._look_at_all()
        self.on_work()

    async def _bring_again(self, job: Job, events: list[Event]) -> None:
        """A job with its log. Whether others can go on after its output exactly is known if its worker is here."""
        attempt = max((event.attempt for event in events), default=0)
        form = self._formats.get(job.id)
        entries = [part for event in events for part in entry_of(event)]
        await self._ask("restore", *facts_of(job), attempt, form or "", int(form is not None), "|", len(events), *entries)

    # --- what the store says ---

    async def _ask(self, operation: str, *args: Any, patient: bool = True) -> Any:
        began = time.perf_counter()
        try:
            result, notes, state = await self._store.call(operation, *args, patient=patient)
        finally:
            self.op_seconds[operation].observe(time.perf_counter() - began)
        waiting, tokens, leased, version, epoch, *classes = state
        self._waiting, self._waiting_tokens, self._leased = waiting, tokens, leased
        self.waiting_by_class = dict(zip(CLASSES, classes, strict=True))
        if self._epoch != epoch:
            lost, self._epoch = self._epoch is not None, epoch
            if lost:
                self._spawn(self._restore())
        if self._version != version:
            self._version = version
            self._spawn(self._learn_holders())
        for kind, *rest in notes:
            self._note(kind, rest)
        return result

    async def _learn_holders(self) -> None:
        self.holders = [read_holder(entry) for entry in await self._ask("holders")]

    def _note(self, kind: bytes, rest: list[Any]) -> None:
        counts = self.counts
        match kind:
            case b"news":
                self._look_at(rest[0].decode())
            case b"revoke":
                session, job, attempt, reason = rest
                self._revoke(session.decode(), job.decode(), attempt, reason.decode())
            case b"accepted":
                counts.accepted += 1
            case b"stale":
                counts.stale_frames += 1
            case b"resumed":
                counts.resumed_tokens += rest[0]
            case b"outcome":
                counts.outcomes[rest[0].decode()] += 1
            case b"redelivery":
                reason = rest[0].decode()
                counts.redeliveries[reason] = counts.redeliveries.get(reason, 0) + 1

    def _hint(self, channel: str, data: bytes) -> None:
        if channel == "bell":
            if data.decode() != self.gateway:
                self._waiting = max(self._waiting, 1)
                self.on_work()
            return
        kind, *rest = msgspec.json.decode(data)
        if kind == "news":
            for job in rest:
                self._look_at(job)
        else:
            self._revoke(*rest)

    def _revoke(self, session: str, job: str, attempt: int, reason: str) -> None:
        self._forget(job, attempt)
        if (entry := self._sessions.get(session)) is not None:
            entry[1](job, attempt, reason)

    # --- logs ---

    def _look_at(self, job: str) -> None:
        self._due.add(job)
        self._fresh.set()

    def _look_at_all(self) -> None:
        self._due.update(self._readers)
        self._fresh.set()

    async def _fetch(self) -> None:
        """Read the logs that have news; never returns."""
        while True:
            await self._fresh.wait()
            self._fresh.clear()
            due, self._due = self._due, set()
            with contextlib.suppress(BrokerUnavailable):
                self._miss(await self._read([job for job in due if job in self._readers]))

    def _miss(self, jobs: list[str]) -> None:
        """Jobs with readers that are not there: the gateway that they came in through may bring them again."""
        now = time.monotonic()
        self._missing = {job: self._missing.get(job, now) for job in {*jobs, *(self._missing.keys() & self._readers.keys())}}
        for job in jobs:
            if job not in self._own and now - self._missing[job] > LOST_SECONDS:
                self._end_here(job, "lost", "what keeps the requests has lost this one")

    async def _read(self, jobs: list[str]) -> list[str]:
        """Bring readers of some jobs up to date; returns the jobs that there are not."""
        if not jobs:
            return []
        args = []
        for job in jobs:
            attempt, seq = min(reader.after for reader in self._readers[job])
            args += [job, f"{attempt}-{seq + 1}"]
        found = await self._ask("read", len(jobs), *args)
        for job, entries in zip(jobs, found, strict=True):
            if entries is not None:
                self._missing.pop(job, None)
            if entries:
                self._tell(job, [event_of(entry) for entry in entries])
        return [job for job, entries in zip(jobs, found, strict=True) if entries is None]

    def _tell(self, job: str, events: Sequence[Event]) -> None:
        left = []
        for reader in self._readers.get(job, ()):
            heard = reader.hear(events)
            if not heard:
                self._look_at(job)
            if not heard or events[-1].kind not in TERMINAL:
                left.append(reader)
        if left:
            self._readers[job] = left
        else:
            self._readers.pop(job, None)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
