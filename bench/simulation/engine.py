"""One server under a virtual clock: requests arrive, a policy admits and plans, a step takes what the machine's model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulation.cost import Machine
from bench.simulation.policies import Policy, Running
from headrace_launcher.bench.workloads import Lengths
from headrace_router.presets import Preset
from headrace_router.tenants import ANONYMOUS, Tenant
from headrace_shard.kv.blocks import BLOCK_SIZE, blocks_for
from headrace_shard.scheduler import OLDEST

MAX_BATCH = 256


@dataclass(frozen=True)
class Trace:
    """What a simulation gave.

    Attributes:
        ended: requests with all their tokens; `refused`: those that were turned away; `late`: those whose client left at its
            deadline, or that were dropped shortly before.
        seconds: virtual time until the last end. `preempted`: how often.
    """

    ended: list[Running]
    refused: list[Running]
    late: list[Running]
    seconds: float
    steps: int
    preempted: int


class Simulation:
    """Runs a policy over requests that come at given times."""

    def __init__(self, policy: type[Policy], machine: Machine, tuned: Preset, max_batch: int = MAX_BATCH) -> None:
        self._now = 0.0
        self.policy = policy(machine, tuned, lambda: self._now)
        self._machine, self._tuned, self._max_batch = machine, tuned, max_batch
        self.free = self.blocks = machine.kv_tokens // BLOCK_SIZE
        self._batch: list[Running] = []
        self._cached: set[tuple[str, int]] = set()  # shared beginnings that have been computed
        self._admissions = self._preempted = 0

    def run(
        self, drawn: Sequence[Lengths], at: Sequence[float], patience: float | None = None,
        tenants: Sequence[Tenant] = (ANONYMOUS,),
    ) -> Trace:
        """Serve all of them. `patience`: seconds after which clients leave. The tenants take turns.

        Raises:
            ValueError: one is larger than the whole KV cache.
        """
        coming = [
            Running(lengths, i, time, tenants[i % len(tenants)], None if patience is None else time + patience)
            for i, (lengths, time) in enumerate(zip(drawn, at, strict=True))
        ]
        if any(blocks_for(request.cost) > self.blocks for request in coming):
            raise ValueError("a request is larger than the KV cache")
        ended: list[Running] = []
        refused: list[Running] = []
        late: list[Running] = []
        steps, arrived = 0, 0
        while arrived < len(coming) or self._batch or len(self.policy.queue):
            while arrived < len(coming) and coming[arrived].at <= self._now:
                self.policy.places = self._max_batch - len(self._batch)
                refuses = self.policy.refuses(coming[arrived])
                refused.append(coming[arrived]) if refuses else self.policy.queue.push(coming[arrived])
                arrived += 1
            late += self._expire()
            self._admit()
            if not self._batch:
                if arrived < len(coming):
                    self._now = max(self._now, coming[arrived].at)
                continue
            ended += self._step()
            steps += 1
        return Trace(ended, refused, late, self._now, steps, self._preempted)

    def _expire(self) -> list[Running]:
        """Who leaves now, waiting or running."""
        policy, now = self.policy, self._now
        gone = [r for r in policy.queue if policy.drops(r) or (r.deadline is not None and r.deadline <= now)]
        for request in gone:
            request.ended = True
            policy.queue.forget(request, request.known if request.said else 0)
        for request in [r for r in self._batch if r.deadline is not None and r.deadline <= now]:
            request.ended = True
            self._leave(request)
            gone.append(request)
        return gone

    def _admit(self) -> None:
        room = self.free

        def fits(request: Running) -> bool:
            nonlocal room
            need = self.policy.need(request)
            if need > room:
                return False
            room -= need
            return True

        self.policy.places = self._max_batch - len(self._batch)
        for request in self.policy.take(fits):
            self._admissions += 1
            request.admitted = self._admissions
            request.since = request.since or self._now
            if (request.workload, request.lengths.group) in self._cached:
                request.computed = request.lengths.shared // BLOCK_SIZE * BLOCK_SIZE
            self._hold(request, max(self.policy.reserve(request), blocks_for(request.computed)))
            self._batch.append(request)

    def _step(self) -> list[Running]:
        """One step; returns those that end with it."""
        policy = self.policy
        self._batch.sort(key=policy.order)
        prompts = [request for request in self._batch if not request.decoding]
        rows: list[Running] = []
        if policy.mixed or not prompts:
            for request in [request for request in self._batch if request.decoding]:
                if request in self._batch and self._grow(request, request.known):
                    rows.append(request)
            rows = [request for request in rows if request in self._batch]
        chunks: list[tuple[Running, int]] = []
        budget = policy.budget(len(rows))
        oldest = min(prompts, key=lambda request: request.admitted, default=None)
        kept = budget // OLDEST
        for request in prompts:
            if request is oldest:
                kept = 0
            if request not in self._batch or budget <= kept:
                continue
            room = (request.held + self.free) * BLOCK_SIZE - request.computed
            count = min(request.known - request.computed, budget - kept, room)
            if count > 0:
                self._hold(request, max(blocks_for(request.computed + count) - request.held, 0))
                chunks.append((request, count))
                budget -= count
        if not rows and not chunks:  # prompts hold what each other needs
            self._preempt()
            return []
        tokens = sum(count for _, count in chunks)
        seconds = self._machine.seconds(len(rows), tokens, sum(request.known for request in rows))
        self._now += seconds
        for request, count in [*((request, 1) for request in rows), *chunks]:
            request.computed += count
            if request.computed >= request.lengths.shared:
                self._cached.add((request.workload, request.lengths.group))
            if request.computed == request.known:
                request.said += 1
                request.times.append(self._now)
        policy.learn(seconds, len(rows), tokens)
        done = [request for request in self._batch if request.said == request.lengths.output]
        for request in done:
            request.ended = True
            self._leave(request)
        return done

    def _grow(self, request: Running, tokens: int) -> bool:
        """Blocks for so many tokens; others are preempted for them, and at last the request itself."""
        while (missing := blocks_for(tokens) - request.held) > self.free:
            if self._preempt() is request:
                return False
        self._hold(request, max(missing, 0))
        return True

    def _preempt(self) -> Running:
        victim = max(self._batch, key=self.policy.order)
        self._leave(victim)
        victim.computed = 0
        self._preempted += 1
        self.policy.queue.push_head([victim])
        return victim

    def _leave(self, request: Running) -> None:
        self._batch.remove(request)
        self.free += request.held
        request.held = 0
        self.policy.left(request)

    def _hold(self, request: Running, count: int) -> None:
        self.free -= count
        request.held += count
