"""The waiting requests, and who is next.

- Requests that were admitted before and lost their place (preempted, refused for lack of room) come first, in their order
  of arrival.
- Between workload classes the one whose oldest request has waited longest beyond its class's patience is next: chats
  pass documents, but none waits for ever.
- Within a class the tenant is next that was given the fewest tokens for its weight (Sheng et al., Fairness in Serving
  Large Language Models, OSDI 2024: the virtual token counter), and within a tenant the first that came.
- A request that there is no room for lets later ones pass, but only so many.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from headrace_router.pace import Drain
from headrace_router.tenants import Tenant

PATIENCE = {"chat": 0.0, "agent": 2.0, "document": 30.0}  # seconds by which a class lets others go before it
PASSES = 16  # requests that may pass one for which there is no room
LOOKAHEAD = 32  # requests without room that are passed over at a time


class Waiting(Protocol):
    """What the queue must know of a request, and the one number that it keeps there: how many have passed it."""

    passed: int

    @property
    def tenant(self) -> Tenant: ...

    @property
    def workload(self) -> str: ...

    @property
    def arrival(self) -> int: ...

    @property
    def cost(self) -> int:
        """Tokens that it may take, prompt included."""
        ...

    @property
    def ended(self) -> bool: ...


W = TypeVar("W", bound=Waiting)
Line = deque[tuple[float, W]]  # with the second at which it was pushed


class RequestQueue(Generic[W]):
    """Requests that wait for a place in the batch. Ended ones (cancelled while they waited) count for nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: dict[str, dict[str, Line[W]]] = {name: {} for name in PATIENCE}  # by class and tenant
        self._drains = {name: Drain() for name in PATIENCE}
        self._head: Line[W] = deque()  # by arrival
        self._length = 0
        self._tokens = 0
        self._charged: set[W] = set()  # taken, and not left yet
        self._given: dict[str, float] = {}  # tokens by weight, of tenants
        self._level = 0.0  # what had been given to the tenant that was next last

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> int:
        """What those that wait may take."""
        return self._tokens

    def wait(self, workload: str, tenant: Tenant) -> float:
        """Seconds that a new request of the tenant and class will wait, if its class goes on leaving as it did.

        Of other tenants as many go before it as their weights allow, and no more than are there.
        """
        lines = {name: sum(not request.ended for _, request in line) for name, line in self._lines[workload].items()}
        weights = {line[0][1].tenant.name: line[0][1].tenant.weight for line in self._lines[workload].values() if line}
        own = lines.pop(tenant.name, 0)
        turn = (own + 1) / tenant.weight
        ahead = own + sum(min(count, turn * weights.get(name, 0.0)) for name, count in lines.items())
        return (ahead + len(self._head)) * self._drains[workload].gap

    def push(self, request: W) -> None:
        """Add a new request at the end of its tenant's line in its class."""
        name, lines = request.tenant.name, self._lines[request.workload]
        if not any(name in others for others in self._lines.values()):
            # Who was away has not saved anything up.
            self._given[name] = max(self._given.get(name, 0.0), self._level)
        now = self._clock()
        if not any(lines.values()):
            self._drains[request.workload].begin(now)
        lines.setdefault(name, deque()).append((now, request))
        self._length += 1
        self._tokens += request.cost

    def push_head(self, requests: Iterable[W]) -> None:
        """Put back requests that had their turn already."""
        back = [(self._clock(), request) for request in requests if not request.ended]
        self._head = deque(sorted([*self._head, *back], key=lambda waiting: waiting[1].arrival))
        self._length += len(back)
        self._tokens += sum(request.cost for _, request in back)

    def forget(self, request: W, used: int = 0) -> None:
        """A waiting request has ended, perhaps one that ran before and used so many tokens; it is dropped for good when its
        turn comes.
        """
        self.refund(request, used)
        self._length -= 1
        self._tokens -= request.cost
        if not self._length:
            self._head.clear()
            for lines in self._lines.values():
                lines.clear()

    def refund(self, request: W, used: int) -> None:
        """A request has left; if it was taken it has used so many tokens."""
        if request not in self._charged:
            return
        self._charged.discard(request)
        name = request.tenant.name
        self._given[name] = self._given.get(name, 0.0) - (request.cost - used) / request.tenant.weight

    def take(
        self, most: int, fits: Callable[[W], bool] = lambda request: True, may: Callable[[str], bool] = lambda workload: True
    ) -> list[W]:
        """The next requests, at most that many, of those that fit; those that do not keep their places. `may`: can a new
        request of this class be taken now? Asked again after each.
        """
        taken: list[W] = []
        new: Counter[str] = Counter()  # of these, by class, those that have their first turn
        aside: list[tuple[Line[W], float, W, int]] = []  # without room; with the number taken before
        while len(taken) < most and len(aside) < LOOKAHEAD and (line := self._next(may)) is not None:
            since, request = line.popleft()
            if request.ended:
                continue
            if fits(request):
                taken.append(request)
                if line is not self._head:
                    new[request.workload] += 1
                    self._charge(request)
                continue
            aside.append((line, since, request, len(taken)))
            if request.passed >= PASSES:
                break
        for line, since, request, before in reversed(aside):
            request.passed += len(taken) - before
            line.appendleft((since, request))
        self._length -= len(taken)
        self._tokens -= sum(request.cost for request in taken)
        for workload, lines in self._lines.items():
            for name in [name for name, line in lines.items() if not line]:
                del lines[name]
            if new[workload]:
                self._drains[workload].left(new[workload], self._clock(), more=bool(lines))
        return taken

    def _next(self, may: Callable[[str], bool]) -> Line[W] | None:
        """Where the next request is the first."""
        if self._head:
            return self._head
        waiting = [(lines, name) for name, lines in self._lines.items() if any(lines.values()) and may(name)]
        if not waiting:
            return None
        lines, _ = min(waiting, key=lambda w: PATIENCE[w[1]] + min(line[0][0] for line in w[0].values() if line))
        tenant = min((name for name, line in lines.items() if line), key=lambda name: self._given[name])
        return lines[tenant]

    def _charge(self, request: W) -> None:
        """A request costs its tenant all that it may take, until it is known what it did."""
        name = request.tenant.name
        self._charged.add(request)
        self._level = max(self._level, self._given[name])
        self._given[name] += request.cost / request.tenant.weight

    def __iter__(self) -> Iterator[W]:
        """Those that wait, in no particular order."""
        for line in (self._head, *(line for lines in self._lines.values() for line in lines.values())):
            yield from (request for _, request in line if not request.ended)
