"""Who runs when: the policies that are compared. The server's own parts are used, not imitated, where it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from bench.simulation.cost import Machine
from headrace._common.errors import QueueFull
from headrace_launcher.bench.workloads import Lengths
from headrace_router.door import Door
from headrace_router.entry import PRIORITY
from headrace_router.pace import Forecast
from headrace_router.presets import Preset
from headrace_router.prompts import Prompts
from headrace_router.queue import RequestQueue
from headrace_router.tenants import ANONYMOUS, Tenant
from headrace_shard.kv.blocks import BLOCK_SIZE, blocks_for
from headrace_shard.pace import Pace
from headrace_shard.requests import Timings


@dataclass(eq=False)
class Running:
    """A request of the simulation. Times are in virtual seconds."""

    lengths: Lengths
    arrival: int  # a running number
    at: float
    tenant: Tenant = ANONYMOUS
    deadline: float | None = None  # when its client leaves
    passed: int = 0
    ended: bool = False
    said: int = 0  # output tokens
    computed: int = 0  # tokens whose K and V are there
    held: int = 0  # KV blocks
    admitted: int = 0  # a running number, of the last admission
    brought: int = 0  # output tokens that it had then
    since: float = 0.0  # of the first admission
    times: list[float] = field(default_factory=list)  # of each output token

    @property
    def workload(self) -> str:
        return self.lengths.workload

    @property
    def prompt(self) -> int:
        return self.lengths.shared + self.lengths.own

    @property
    def known(self) -> int:
        """Tokens that are there."""
        return self.prompt + self.said

    @property
    def cost(self) -> int:
        return self.prompt + self.lengths.output

    @property
    def decoding(self) -> bool:
        return self.known - self.computed == 1 and self.said > 0

    @property
    def begun(self) -> bool:
        """It has had a token since its last admission, or has ended."""
        return self.said > self.brought or self.ended


Fits = Callable[[Running], bool]


class Queue(Protocol):
    """Those who wait."""

    def __len__(self) -> int: ...

    def push(self, request: Running) -> None: ...

    def push_head(self, requests: Iterable[Running]) -> None: ...

    def forget(self, request: Running, used: int = 0) -> None: ...

    def __iter__(self) -> Iterator[Running]: ...

    def take(self, most: int, fits: Fits) -> list[Running]: ...


class Fifo:
    """First come, first served: one for whom there is no room stops all others."""

    def __init__(self) -> None:
        self._line: list[Running] = []

    def __len__(self) -> int:
        return len(self._line)

    def push(self, request: Running) -> None:
        self._line.append(request)

    def push_head(self, requests: Iterable[Running]) -> None:
        self._line = sorted([*self._line, *requests], key=lambda request: request.arrival)

    def forget(self, request: Running, used: int = 0) -> None:
        self._line.remove(request)

    def __iter__(self) -> Iterator[Running]:
        return iter(self._line)

    def take(self, most: int, fits: Fits) -> list[Running]:
        count = 0
        while count < min(most, len(self._line)) and fits(self._line[count]):
            count += 1
        taken, self._line = self._line[:count], self._line[count:]
        return taken


class Policy:
    """First come with mixed steps: admitted by need, decode rows first, prompts in chunks of what a fixed budget leaves,
    and the youngest preempted when KV runs dry.
    """

    mixed = True  # prompts and decode rows share steps

    def __init__(self, machine: Machine, tuned: Preset, clock: Callable[[], float]) -> None:
        self.machine, self.tuned, self.clock = machine, tuned, clock
        self.queue: Queue = self.make_queue()
        self.places = 0  # that are free in the batch

    def make_queue(self) -> Queue:
        return Fifo()

    def refuses(self, request: Running) -> bool:
        """Is a request that arrives turned away?"""
        return len(self.queue) >= self.tuned.max_queue_size

    def take(self, fits: Fits) -> list[Running]:
        """Who is admitted now."""
        return self.queue.take(self.places, fits)

    def drops(self, request: Running) -> bool:
        """Is a waiting request given up?"""
        return False

    def need(self, request: Running) -> int:
        """KV blocks that must be free for a request to be admitted."""
        return request.known // BLOCK_SIZE + 1

    def reserve(self, request: Running) -> int:
        """KV blocks that it holds from its admission on."""
        return 0

    def budget(self, rows: int) -> int:
        """Prompt tokens of a step beside so many decode rows."""
        return max(self.tuned.max_step_tokens - rows, 1)

    def order(self, request: Running) -> tuple[int, int]:
        """Who is served first, and preempted last, is the smallest."""
        return 0, request.admitted

    def learn(self, seconds: float, rows: int, prompt_tokens: int) -> None:
        """A step has taken so long."""

    def left(self, request: Running) -> None:
        """A request has left the batch."""


class Tgi(Policy):
    """TGI's: first come, room for prompt and longest answer reserved at admission, prompts in steps of their own."""

    mixed = False

    def need(self, request: Running) -> int:
        return blocks_for(request.cost)

    def reserve(self, request: Running) -> int:
        return blocks_for(request.cost)

    def budget(self, rows: int) -> int:
        return 1 << 30


class Headrace(Policy):
    """Ours: classes with patience and fair shares, bounded passing, no more prompts in the shard than it computes in a moment,
    requests turned away that will be late, and chunks that keep to the time of a step.
    """

    queue: RequestQueue[Running]

    def __init__(self, machine: Machine, tuned: Preset, clock: Callable[[], float]) -> None:
        super().__init__(machine, tuned, clock)
        self._pace = Pace()
        self._prompts: Prompts[Running] = Prompts(clock)
        self._forecast = Forecast()
        self._door = Door(tuned, self, self._forecast, lambda: 1.0)

    def make_queue(self) -> Queue:
        return RequestQueue(self.clock)

    @property
    def backlog(self) -> int:
        return len(self.queue) - (self.places if self._may("document") else 0)

    @property
    def waiting_tokens(self) -> int:
        return self.queue.tokens

    def wait(self, workload: str, tenant: Tenant) -> float:
        return self.queue.wait(workload, tenant)

    def refuses(self, request: Running) -> bool:
        left = None if request.deadline is None else request.deadline - self.clock()
        try:
            self._door.check(request.workload, request.tenant, request.prompt, request.lengths.output, 0, left)
        except QueueFull:
            return True
        return False

    def take(self, fits: Fits) -> list[Running]:
        def admit(request: Running) -> bool:
            if not fits(request):
                return False
            self._prompts.add(request, request.known, PRIORITY[request.workload])
            request.brought = request.said
            return True

        return self.queue.take(self.places, admit, self._may)

    def _may(self, workload: str) -> bool:
        return self._prompts.may_add(PRIORITY[workload])

    def drops(self, request: Running) -> bool:
        if request.deadline is None or request.said or self.backlog <= 0:
            return False
        return self.clock() > request.deadline - self._forecast.stay(request.workload, request.lengths.output, 0)

    def budget(self, rows: int) -> int:
        budget = super().budget(rows)
        if self.tuned.itl_target_ms and rows:
            budget = min(budget, self._pace.prompt_tokens(self.tuned.itl_target_ms / 1e3))
        return budget

    def order(self, request: Running) -> tuple[int, int]:
        return -PRIORITY[request.workload], request.admitted

    def learn(self, seconds: float, rows: int, prompt_tokens: int) -> None:
        self._pace.learn(Timings(total=seconds, decode_tokens=rows, prefill_tokens=prompt_tokens))
        self._prompts.step()

    def left(self, request: Running) -> None:
        self._prompts.remove(request)
        if request.ended:
            self.queue.refund(request, request.known)
        seconds = self.clock() - request.since
        if request.said == request.lengths.output:
            self._forecast.ended(request.workload, request.lengths.output, request.said, seconds)
        elif request.ended:
            self._forecast.cut(request.workload, request.lengths.output, seconds)


POLICIES: dict[str, type[Policy]] = {"tgi": Tgi, "first-come": Policy, "headrace": Headrace}
