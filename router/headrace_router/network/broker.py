"""The interface of every broker: each method is one atomic transition, fenced by (job, attempt).

    submit -> queued -> lease -> leased -> progress ... -> done
                 ^                |
                 +--- release ----+     cancel, expire, fail: from anywhere -> terminal

- A frame of an attempt that is not the current one, or of a job that nobody holds, changes nothing: the method says False.
- A job that is released goes back to the place that its score gives it, before later ones, with its tokens kept; the next
  lease has the next attempt. After `max_attempts` it fails.
- Each accepted job gets exactly one terminal event, the last of its log. Token indices in a log have no gap and no repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace_router.network.jobs import Counts, Event, Holder, Job, JobStatus, Lease, Progress

Listener = Callable[[Sequence[Event]], None]
Revoked = Callable[[str, int, str], None]  # (job, attempt, reason): a holder must stop it


class Broker(Protocol):
    """Keeps jobs, hands them out, and keeps what comes of them."""

    counts: Counts

    async def submit(self, job: Job) -> int:
        """Accept a job; returns its position in the queue.

        Raises:
            QueueFull: as many wait as may; nothing of the job is kept.
        """
        ...

    async def attach(self, holder: Holder, revoked: Revoked) -> None:
        """A session may hold leases from now on; once more for one that does: it has changed, and keeps what it holds."""
        ...

    async def detach(self, session: str, reason: str) -> None:
        """A session is gone: all that it holds is released."""
        ...

    async def lease(self, session: str, most: int) -> list[Lease]:
        """Hand out the next jobs that the session can run, at most that many.

        It must be trusted enough for a job, have room and the features for it. If it, or who had the job before, does not
        resume exactly, the output begins again: `reset`. A job that is `only` for a session goes to that one, always.
        """
        ...

    async def progress(self, news: Progress) -> bool:
        """Append tokens, and the end; renews the lease. Tokens that the log has are ignored; a gap releases the job."""
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

    async def cancel(self, job: str, by: str) -> bool:
        """End a job from the client's side."""
        ...

    async def sweep(self) -> None:
        """Act on what has passed: leases, deadlines, logs kept long enough. To be called several times a second."""
        ...

    async def refuse_waiting(self, code: str, message: str) -> None:
        """Fail the jobs that wait and that no worker has ever had."""
        ...

    async def end_all(self, code: str, message: str) -> None:
        """Fail every job: the gateway stops."""
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
    def leased(self) -> int:
        """Jobs that sessions hold."""
        ...

    async def status(self, job: str) -> JobStatus | None:
        """None: there is no such job, or not any more."""
        ...

    def subscribe(self, job: str, after: int, listener: Listener) -> Callable[[], None]:
        """Have the job's events with `seq` > `after` told: those that are there before this returns. Returns the way out.

        Raises:
            NotFound: there is no such job.
        """
        ...
