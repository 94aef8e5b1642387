"""Where each request of a batcher is: it waits, it runs, or it has left here and may still run in the shard."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from headrace._common.errors import HeadraceError
from headrace_router.entry import PRIORITY, Entry
from headrace_router.prompts import Prompts
from headrace_router.queue import RequestQueue


class Room:
    """KV blocks that were free at the last step, as far as they are known. The shard has the last word."""

    def __init__(self, block_size: int, free: int | None) -> None:
        """`free` None: not known, everything is tried."""
        self._block_size, self._free = block_size, free
        self.lacking = False  # somebody was refused

    def take(self, entry: Entry) -> bool:
        """Is there room for a request's tokens and its next one? If so, it is taken."""
        if self._free is None:
            return True
        need = (len(entry.request.prompt) + len(entry.output)) // self._block_size + 1
        if need > self._free:
            self.lacking = True
            return False
        self._free -= need
        return True


class Roster:
    """The queue and the running requests. A request that runs has a wire id, a new one for each admission."""

    def __init__(self) -> None:
        self.queue: RequestQueue[Entry] = RequestQueue()
        self.prompts: Prompts[Entry] = Prompts()
        self.running: dict[int, Entry] = {}  # by wire id; admitted, or sent and not refused yet
        self.leaving: set[int] = set()  # wire ids that have left here and may still run in the shard
        self._last_wire_id = 0

    @property
    def running_tokens(self) -> int:
        """Tokens that the running requests may grow to."""
        return sum(len(e.request.prompt) + e.request.max_new_tokens for e in self.running.values())

    def admit(self, most: int, room: Room, now: float) -> list[Entry]:
        """Take the waiting requests that there is room for, at most that many, suspects one by one; they run from now on."""
        entries = self.queue.take(most, partial(self._take, room), self.may_admit)
        for at, entry in enumerate(entries):
            if entry.alone:
                at = max(at, 1)
                self.queue.push_head(entries[at:])
                for suspect in entries[at:]:
                    self.prompts.remove(suspect)
                del entries[at:]
                break
        for entry in entries:
            self._last_wire_id += 1
            entry.wire_id = self._last_wire_id
            entry.admitted = entry.admitted or now
            entry.stream.queue_seconds = entry.admitted - entry.submitted
            entry.stream.placed = now
            self.running[entry.wire_id] = entry
        return entries

    def _take(self, room: Room, entry: Entry) -> bool:
        if not room.take(entry):
            return False
        entry.brought = len(entry.output)
        self.prompts.add(entry, len(entry.request.prompt) + len(entry.output), PRIORITY[entry.workload])
        return True

    def may_admit(self, workload: str) -> bool:
        """Should the shard be given a request of this class now, or has it enough of them?"""
        return self.prompts.may_add(PRIORITY[workload])

    def leave(self, wire_id: int) -> None:
        """A running request ends on this side while the shard still runs it."""
        entry = self.running.pop(wire_id)
        self.prompts.remove(entry)
        self._refund(entry)
        self.leaving.add(wire_id)

    def finish(self, wire_id: int) -> Entry | None:
        """A request has ended in the shard; returns it if it has not ended here."""
        self.leaving.discard(wire_id)
        entry = self._pop(wire_id)
        if entry is not None:
            self._refund(entry)
        return entry

    def _pop(self, wire_id: int) -> Entry | None:
        entry = self.running.pop(wire_id, None)
        if entry is not None:
            self.prompts.remove(entry)
        return entry

    def _refund(self, entry: Entry) -> None:
        self.queue.refund(entry, len(entry.request.prompt) + len(entry.output))

    def end(self, wire_id: int) -> Entry | None:
        """The shard runs a request no longer; returns it if it has not ended here."""
        self.leaving.discard(wire_id)
        return self._pop(wire_id)

    def take_back(self, wire_ids: Iterable[int]) -> list[Entry]:
        """Requests that the shard runs no longer, without an end; returns those that have not ended here."""
        entries = [entry for wire_id in wire_ids if (entry := self.end(wire_id)) is not None]
        for entry in entries:
            entry.wire_id = 0
            entry.stream.placed = None
        return entries

    def take_all_back(self) -> list[Entry]:
        """`take_back` of every request: the shard has lost the batch."""
        self.leaving.clear()
        return self.take_back(list(self.running))

    def fail(self, entries: Iterable[Entry], error: HeadraceError) -> None:
        """Give requests that are in no list any more their terminal event."""
        for entry in entries:
            self._refund(entry)
            if not entry.ended:
                entry.stream.fail(error)
