"""The waiting requests: first come, first served within a workload class, more urgent classes first.

Requests that were admitted before and lost their place (preempted, refused for lack of room) go to the head and keep
their order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from headrace_router.tenants import CLASSES


class Waiting(Protocol):
    """What the queue must know of a request."""

    @property
    def workload(self) -> str: ...

    @property
    def arrival(self) -> int: ...

    @property
    def ended(self) -> bool: ...


W = TypeVar("W", bound=Waiting)


class RequestQueue(Generic[W]):
    """Requests that wait for a place in the batch. Ended ones (cancelled while they waited) count for nothing."""

    def __init__(self) -> None:
        self._classes: dict[str, deque[W]] = {name: deque() for name in CLASSES}
        self._head: deque[W] = deque()  # by arrival
        self._ended = 0

    def __len__(self) -> int:
        return len(self._head) + sum(len(waiting) for waiting in self._classes.values()) - self._ended

    def push(self, request: W) -> None:
        """Add a new request at the end of its class."""
        self._classes[request.workload].append(request)

    def push_head(self, requests: Iterable[W]) -> None:
        """Put back requests that had their turn already."""
        self._head = deque(sorted([*self._head, *requests], key=lambda request: request.arrival))

    def forget(self) -> None:
        """One of the waiting requests has ended; it is dropped for good when its turn comes."""
        self._ended += 1
        if len(self) == 0:
            self._head.clear()
            for waiting in self._classes.values():
                waiting.clear()
            self._ended = 0

    def take(self, most: int, fits: Callable[[W], bool] = lambda request: True) -> list[W]:
        """The next requests, at most that many, up to the first one that does not fit: nobody overtakes it."""
        taken: list[W] = []
        while len(taken) < most and (waiting := self._next()) is not None:
            if waiting[0].ended:
                self._ended -= 1
            elif fits(waiting[0]):
                taken.append(waiting[0])
            else:
                break
            waiting.popleft()
        return taken

    def _next(self) -> deque[W] | None:
        """The line whose first request is the next."""
        return next((waiting for waiting in (self._head, *self._classes.values()) if waiting), None)

    def __iter__(self) -> Iterator[W]:
        """Those that wait, in no particular order."""
        for waiting in (self._head, *self._classes.values()):
            yield from (request for request in waiting if not request.ended)
