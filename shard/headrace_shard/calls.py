"""Batches and the calls that work on them: who may take over what, and when a call ends.

Everything here runs on the executor's thread, at step boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace._common.errors import AlreadyExists, HeadraceError, InvalidRequest, NotFound, Overloaded
from headrace_shard.batch import RunningBatch
from headrace_shard.kv.blocks import BlockManager, blocks_for
from headrace_shard.kv.prefix import PrefixCache
from headrace_shard.requests import CANCELLED, FINISHED, MAX_STEPS, RUNNING, YIELDED, Request, StepResult

UNREAD_LIMIT = 64  # Steps that wait for the client; then its rows sit out
CANCELLED_LEASE = 5.0  # seconds
WATERMARK = 0.01  # of the KV blocks stay free for running requests to grow into when others are admitted


@dataclass(eq=False)
class Call:
    """A Prefill (`requests` is not None) or a Decode.

    `delivered` is written by the thread that reads the stream, everything else by the executor.
    """

    owner: str
    batch_ids: tuple[int, ...]
    requests: tuple[Request, ...] | None = None
    max_steps: int = 0
    max_step_tokens: int = 0
    itl_target: float = 0.0  # seconds; 0: none
    steps: int = 0
    emitted: int = 0
    delivered: int = 0
    cancelled: bool = False
    end: int = RUNNING
    waiting: set[int] = field(default_factory=set)  # Prefill: slots without a first token
    result: StepResult | None = None  # of the last step, until it is handed over

    @property
    def blocked(self) -> bool:
        """Whether the client has left too many Steps unread."""
        return self.emitted - self.delivered >= UNREAD_LIMIT


@dataclass(eq=False)
class Batch:
    id: int
    owner: str
    slots: dict[int, int] = field(default_factory=dict)  # request id -> slot
    call: Call | None = None
    expires: float = math.inf


class BatchTable:
    """All batches. `outbox` collects (call, StepResult or error) for the hand-over at the boundary."""

    def __init__(self, rows: RunningBatch, blocks: BlockManager, prefix: PrefixCache, lease: float) -> None:
        self.rows, self.blocks, self.prefix, self.lease = rows, blocks, prefix, lease
        self.batches: dict[int, Batch] = {}
        self.outbox: list[tuple[Call, StepResult | HeadraceError]] = []
        self.step = 0
        self._pending: list[Call] = []
        self._next_id = 1

    # what clients ask for

    def submit(self, call: Call, now: float) -> None:
        """Take a new call; it starts now or when its batches are free for it."""
        try:
            self._check(call)
        except HeadraceError as error:
            self.outbox.append((call, error))
            return
        self._pending.append(call)
        self.start_pending(now)

    def filter(self, batch_id: int, owner: str, keep: Iterable[int], now: float) -> int:
        """Keep these requests, free the others; returns how many are left.

        Raises:
            NotFound: no such batch of this owner.
        """
        batch = self._find(batch_id, owner)
        kept = set(keep)
        for request_id in [i for i in batch.slots if i not in kept]:
            self.drop(batch.slots[request_id])
        self._settle(batch, now)
        return len(batch.slots)

    def clear(self, batch_id: int, owner: str, now: float) -> int:
        """Free one batch, or (0) all of the owner; returns how many.

        Raises:
            NotFound: no such batch of this owner.
        """
        chosen = [self._find(batch_id, owner)] if batch_id else [b for b in self.batches.values() if b.owner == owner]
        for batch in chosen:
            for slot in list(batch.slots.values()):
                self.drop(slot)
            self._settle(batch, now)
        return len(chosen)

    def cancel(self, call: Call, now: float) -> None:
        """The client has given the call up."""
        call.cancelled = True
        if call in self._pending:
            self._pending.remove(call)
        for batch in self.batches.values():
            if batch.call is call:
                self._end(batch, call, CANCELLED, now)
                break

    # what happens at a boundary

    def start_pending(self, now: float) -> None:
        """Start every waiting call whose batches have no call, or one that has had a step."""
        claimed: set[int] = set()
        for call in list(self._pending):
            named = {i for i in call.batch_ids if i}
            busy = [b.call for i in named if (b := self.batches.get(i)) and b.call]
            if named & claimed or any(not c.steps for c in busy):
                claimed |= named
                continue
            self._pending.remove(call)
            try:
                self._start(call, now)
            except HeadraceError as error:
                self.outbox.append((call, error))

    def settle(self, now: float) -> None:
        """End the calls that the last step has brought to their end."""
        for batch in list(self.batches.values()):
            self._settle(batch, now)

    def expire(self, now: float) -> None:
        """Free the batches whose lease is over."""
        for batch in [b for b in self.batches.values() if b.expires <= now]:
            for slot in list(batch.slots.values()):
                self.drop(slot)
            del self.batches[batch.id]

    def next_expiry(self) -> float:
        """When the next lease is over; inf if none runs."""
        return min((b.expires for b in self.batches.values()), default=math.inf)

    def flush(self) -> list[tuple[Call, StepResult | HeadraceError]]:
        """Everything that is to be handed over now, in order."""
        for batch in self.batches.values():
            if batch.call and batch.call.result:
                self._emit(batch.call, batch.call.result)
        out, self.outbox = self.outbox, []
        return out

    # what a step does to rows

    def at_work(self) -> list[Batch]:
        """Batches with a call."""
        return [b for b in self.batches.values() if b.call]

    def result_of(self, batch: Batch) -> StepResult:
        """The result that the batch's call will hand over for this step."""
        assert batch.call
        if batch.call.result is None:
            batch.call.result = StepResult(batch.id, self.step)
        return batch.call.result

    def drop(self, slot: int) -> None:
        """Free a row and its blocks."""
        batch = self.batches[int(self.rows.batch[slot])]
        del batch.slots[int(self.rows.ids[slot])]
        if batch.call:
            batch.call.waiting.discard(slot)
        self.blocks.release(self.rows.remove(slot))

    def preempt(self, slot: int) -> None:
        """Free a row whose client will admit it again."""
        batch = self.batches[int(self.rows.batch[slot])]
        self.result_of(batch).preempted.append(int(self.rows.ids[slot]))
        self.drop(slot)

    def owed_blocks(self) -> int:
        """Blocks that admitted prompts still need."""
        owed = 0
        for batch in self.batches.values():
            for slot in batch.slots.values():
                owed += max(0, blocks_for(int(self.rows.known[slot]) + 1) - int(self.rows.held[slot]))
        return owed

    # inside

    def _find(self, batch_id: int, owner: str) -> Batch:
        batch = self.batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise NotFound(f"batch {batch_id} does not exist")
        return batch

    def _check(self, call: Call) -> None:
        """Look everything up before anything changes."""
        if call.requests is None and not call.batch_ids:
            raise InvalidRequest("batch_ids is empty: a Decode names at least one batch", "batch_ids")
        if len(set(call.batch_ids)) < len(call.batch_ids):
            raise InvalidRequest(f"batch_ids {list(call.batch_ids)} names a batch twice", "batch_ids")
        new_batch = call.requests is not None and call.batch_ids == (0,)
        taken: set[int] = set()
        for batch in [] if new_batch else [self._find(i, call.owner) for i in call.batch_ids]:
            self._check_ids(taken, batch.slots, f"batch {batch.id}")
        where = "the call" if new_batch else f"batch {call.batch_ids[0]}"
        self._check_ids(taken, [r.id for r in call.requests or ()], where)

    def _check_ids(self, taken: set[int], ids: Iterable[int], where: str) -> None:
        for number in ids:
            if number in taken:
                raise AlreadyExists(f"request id {number} is used twice in {where}", "id")
            taken.add(number)

    def _start(self, call: Call, now: float) -> None:
        self._check(call)
        if call.requests is not None:
            self._check_room(call.requests)
        if call.batch_ids == (0,):
            target = Batch(self._next_id, call.owner)
            self._next_id += 1
            self.batches[target.id] = target
        else:
            target, *others = (self.batches[i] for i in call.batch_ids)
            for batch in (target, *others):
                if batch.call:
                    self._end(batch, batch.call, YIELDED, now)
            self._merge(target, others)
        for request in call.requests or ():
            slot = self.rows.add(request, target.id)
            self.prefix.asked += len(request.tokens)
            target.slots[request.id] = slot
            call.waiting.add(slot)
        target.call, target.expires = call, math.inf

    def _check_room(self, requests: Sequence[Request]) -> None:
        if len(requests) > self.rows.free:
            raise Overloaded(f"{len(requests)} requests; {self.rows.free} of {self.rows.slots} rows are free")
        need = sum(blocks_for(len(r.tokens) + 1) - self.prefix.shared(r) for r in requests)
        reserve = int(WATERMARK * self.blocks.blocks) if self.rows.free < self.rows.slots else 0
        room = self.blocks.free - self.owed_blocks() - reserve
        if need > room:
            raise Overloaded(f"the requests need {need} KV blocks; {max(0, room)} of {self.blocks.blocks} are free")

    def _merge(self, target: Batch, others: Iterable[Batch]) -> None:
        for batch in others:
            for slot in batch.slots.values():
                self.rows.batch[slot] = target.id
            target.slots.update(batch.slots)
            del self.batches[batch.id]

    def _settle(self, batch: Batch, now: float) -> None:
        call = batch.call
        if call:
            if not batch.slots or (call.requests is not None and not call.waiting):
                self._end(batch, call, FINISHED, now)
            elif call.max_steps and call.steps >= call.max_steps:
                self._end(batch, call, MAX_STEPS, now)
        if not batch.slots:
            self.batches.pop(batch.id, None)

    def _end(self, batch: Batch, call: Call, end: int, now: float) -> None:
        """End a call; its last Step says how. The batch stays, for as long as its lease."""
        result = call.result or StepResult(batch.id, self.step)
        result.end = call.end = end
        batch.call = None
        batch.expires = now + (min(CANCELLED_LEASE, self.lease) if end == CANCELLED else self.lease)
        result.running = len(batch.slots)
        self._emit(call, result)

    def _emit(self, call: Call, result: StepResult) -> None:
        batch = self.batches.get(result.batch_id)
        result.running = len(batch.slots) if batch else 0
        result.blocks, result.free_blocks = self.blocks.blocks, self.blocks.free
        result.queried_tokens, result.hit_tokens = self.prefix.asked, self.prefix.hits
        result.step = self.step
        call.result = None
        call.emitted += 1
        self.outbox.append((call, result))
