"""The nouns of the broker: a job, its events, who holds it, and the rules that it lives by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from headrace._common.logs import Origin
from headrace_router.types import End, GenerateRequest, Token

State = Literal["queued", "leased", "done", "failed", "cancelled", "expired"]
TERMINAL = ("done", "failed", "cancelled", "expired")
WINDOW = 32  # waiting jobs looked at for one that a session can run

EventId = tuple[int, int]  # (attempt, seq): orders the events of a job
BEGINNING: EventId = (0, -1)  # before every event

# How far a worker is trusted, from a stranger on probation, who gets probes alone, to the gateway's operator.
PROBATION, OPEN, TRUSTED, OWNER = -1, 0, 1, 2
TIERS = {"open": OPEN, "trusted": TRUSTED, "owner": OWNER}


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the broker keeps it. `flow` is the line that shares fairly with others (a tenant in a class)."""

    id: str
    flow: str
    weight: float
    request: GenerateRequest
    needs: frozenset[str] = frozenset()  # features that a worker which does not have all must have
    min_tier: int = TRUSTED
    only: str | None = None  # the session that it is meant for: a probe
    origin: Origin | None = None  # the call that it came with

    @property
    def cost(self) -> int:
        """What it is expected to take; a decoded token costs twice a prompt token."""
        return len(self.request.prompt) + 2 * self.request.max_new_tokens

    @property
    def total_tokens(self) -> int:
        """Longest that it can become, prompt included."""
        return len(self.request.prompt) + self.request.max_new_tokens


class Event(Struct, frozen=True):
    """An entry of a job's log: `started`, `resumed`, `reset`, `token`, or the one terminal event.

    After a `reset` the output begins again with the token of index 0: no worker could go on with what there was.

    `seq` is its place in the log. `id` orders events over all attempts; as text it is what a reader names to go on after it.
    """

    kind: str
    attempt: int
    seq: int
    index: int = -1  # of a token, in the output
    token: Token | None = None
    end: End | None = None  # of `done`
    facts: dict[str, Any] = {}

    @property
    def id(self) -> EventId:
        return self.attempt, self.seq

    @property
    def name(self) -> str:
        """The id as text."""
        return f"{self.attempt}-{self.seq}"


@dataclass(frozen=True, slots=True)
class Holder:
    """A session that may hold leases, and what it can run."""

    session: str
    weight_format: str
    max_total_tokens: int
    tier: int = TRUSTED
    features: frozenset[str] | None = None  # None: all that requests can need
    resumes: bool = True  # it goes on exactly after tokens of others, and others after its own

    def fits(self, job: Job) -> bool:
        """Could it run the job, if it were free?"""
        if job.only is not None:
            return job.only == self.session
        if job.total_tokens > self.max_total_tokens or job.min_tier > self.tier:
            return False
        return self.features is None or job.needs <= self.features


@dataclass(frozen=True, slots=True)
class Lease:
    """A job handed out. `generated`: the output tokens that its log has already."""

    job: Job
    attempt: int
    generated: tuple[int, ...]
    queue_seconds: float  # from submission to the first lease


class Progress(Struct, frozen=True):
    """What has come from a worker for one job: tokens from `index` on, and the end if that is known with them."""

    job: str
    attempt: int
    index: int
    tokens: list[Token]
    end: End | None = None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What may be told of a job at any time. `position`: jobs before it, only while it is queued."""

    job: Job
    state: State
    attempt: int
    tokens: int
    position: int | None
    last: Event | None  # the terminal event


@dataclass(slots=True)
class Counts:
    """What a broker has seen since it began."""

    accepted: int = 0
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TERMINAL, 0))
    redeliveries: dict[str, int] = field(default_factory=dict)  # by reason
    stale_frames: int = 0
    resumed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of a broker; times in seconds."""

    max_queue_size: int
    max_queue_tokens: int | None = None  # of all that wait; one alone may wait whatever it takes
    max_queue_time: float = 60.0
    max_run_time: float = 600.0
    lease: float = 15.0  # until the first token, beside what the prompt adds
    stall: float = 10.0  # between two tokens
    max_attempts: int = 4
    retention: float = 600.0  # of a log after the terminal event
    prompt_token: float = 0.02  # that each prompt token adds to the first lease
    gateway_silence: float = 5.0  # without a sign of a gateway, until what its workers hold goes elsewhere
