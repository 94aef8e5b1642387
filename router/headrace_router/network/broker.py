"""The interface of every broker: each method is one atomic transition, fenced by (job, attempt).

    submit -> queued -> lease -> leased -> progress ... -> done
                 ^                |
                 +--- release ----+     cancel, expire, fail: from anywhere -> terminal

- A frame of an attempt that is not the current one, or of a job that nobody holds, changes nothing: the method says False.
- A job that is released goes back to the place that its score gives it, before later ones, with its tokens kept; the next
  lease has the next attempt. After `max_attempts` it fails.
- Each accepted job gets exactly one terminal event, the last of its log. Token indices in a log have no gap and no repetition.

A broker may be shared by several gateways: jobs, sessions, positions and counters are then those of all of them. While such a
broker cannot be reached, methods of clients raise `BrokerUnavailable` at once, those of workers only after its grace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from headrace_router.network.jobs import Counts, Event, EventId, Holder, Job, JobStatus, Lease, Progress

Listener = Callable[[Sequence[Event]], None]
Revoked = Callable[[str, int, str], None]  # (job, attempt, reason): a holder must stop it


class Broker(Protocol):
    """Keeps jobs, hands them out, and keeps what comes of them."""

    counts: Counts  # what was done through this gateway
    durable: bool  # jobs outlive this gateway

    on_work: Callable[[], None]  # called when another gateway has brought work

    async def start(self, patience: float) -> None:
        """Begin.

        Raises:
            StartupError: what the jobs are to be kept in cannot be reached within so many seconds, or is not usable.
        """
        ...

    async def close(self, reason: str) -> None:
        """The gateway stops: what its workers hold goes back, and jobs that cannot outlive it fail."""
        ...

    @property
    def problem(self) -> str | None:
        """Why it cannot be used, if it has not been for longer than its grace."""
        ...

    # --- clients ---

    async def submit(self, job: Job) -> int:
        """Accept a job; returns its position in the queue.

        Raises:
            QueueFull: as many wait as may; nothing of the job is kept.
        """
        ...

    async def claim(self, key: str, digest: str) -> str | None:
        """The job that was made under an idempotency key; None: it is the caller's to make, and to `settle`.

        While another caller makes it, this waits.

        Raises:
            Conflict: the key was used for a request of another digest.
        """
        ...

    async def settle(self, key: str, job: str | None) -> None:
        """What came of a claim: a job, or nothing."""
        ...

    async def cancel(self, job: str, by: str) -> bool:
        """End a job from the client's side."""
        ...

    async def status(self, job: str) -> JobStatus | None:
        """None: there is no such job, or not any more."""
        ...

    async def subscribe(self, job: str, after: EventId, listener: Listener) -> Callable[[], None]:
        """Have the job's events after an id told: those that are there before this returns. Returns the way out.

        Raises:
            NotFound: there is no such job.
        """
        ...

    async def live(self, tenant: str) -> int:
        """Jobs of a tenant that have not ended."""
        ...

    # --- workers ---

    async def attach(self, holder: Holder, revoked: Revoked) -> None:
        """A session may hold leases from now on; once more for one that does: it has changed, and keeps what it holds."""
        ...

    async def detach(self, session: str, reason: str) -> None:
        """A session is gone: all that it holds is released."""
        ...

    async def lease(self, session: str, most: int, tokens: int | None = None) -> list[Lease]:
        """Hand out the next jobs that the session can run: at most so many, which may grow to at most so many tokens together.

        If there is no room for the next one, nothing that comes later passes it by.

        It must be trusted enough for a job, have room and the features for it. If it, or who had the job before, does not
        resume exactly, the output begins again: `reset`. A job that is `only` for a session goes to that one, always.
        """
        ...

    async def progress(self, news: Sequence[Progress]) -> list[bool]:
        """Append tokens, and ends, all at once; renews leases. Tokens that a log has are ignored; a gap releases the job."""
        ...

    async def renew(self, session: str, held: Sequence[tuple[str, int]]) -> None:
        """Renew leases of jobs that have no token yet, of a session that makes progress."""
        ...

    async def release(self, job: str, attempt: int, reason: str) -> bool:
        """Put a job back, and keep it from the session that had it while there is another."""
        ...

    async def fail(self, job: str, attempt: int, code: str, message: str) -> bool:
        """End a job that no other worker could run either."""
        ...

    # --- time ---

    async def sweep(self) -> None:
        """Act on what has passed: leases, deadlines, logs kept long enough. To be called several times a second."""
        ...

    async def refuse(self, job: str, code: str, message: str) -> bool:
        """Fail a job that waits and that no worker has ever had."""
        ...

    @property
    def holders(self) -> Collection[Holder]:
        """The sessions that may hold leases now, of all gateways."""
        ...

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """Tokens that they may take, prompts included."""
        ...

    @property
    def waiting_by_class(self) -> Mapping[str, int]:
        """Jobs in the queue, by workload class."""
        ...

    @property
    def leased(self) -> int:
        """Jobs that sessions hold."""
        ...
