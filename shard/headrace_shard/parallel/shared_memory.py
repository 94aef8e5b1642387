"""The ranks of one host over shared memory: a part is computed where the others read it (kernels/src/shared.cpp)."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from headrace_shard.kernels.library import load_code
from headrace_shard.parallel import rendezvous
from headrace_shard.parallel.group import BOTH_HALVES, LOAD_TIMEOUT, GroupBroken
from headrace_shard.step import Ints

SLOT_BYTES = 16 << 20  # of one rank's part; memory is taken where it is written. Larger parts go in pieces
ENDED = 1


class SharedMemoryGroup:
    """One rank. Waiting ranks spin for some microseconds if every thread of the group has a core, then sleep."""

    def __init__(self, rank: int, world_size: int, meeting_place: Path, threads: int) -> None:
        """Meet the other ranks. `threads`: those of each rank.

        Raises:
            BuildFailed: there are no compiled kernels.
            StartupError: not all came within LOAD_TIMEOUT.
        """
        self.rank, self.world_size = rank, world_size
        self._code, self._meetings, self._come = _functions()
        self._control = int(self._code.headrace_shared_control_bytes(world_size))
        size = self._control + 2 * world_size * SLOT_BYTES
        if rank == 0:
            descriptor = os.memfd_create("headrace-shard-group")
            os.ftruncate(descriptor, size)
            self._peers = rendezvous.host(meeting_place, world_size, descriptor, LOAD_TIMEOUT)
        else:
            descriptor, leader = rendezvous.join(meeting_place, rank, world_size, LOAD_TIMEOUT)
            self._peers = {0: leader}
        try:
            self._memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self._begin = int(self._memory.data_ptr())
        sockets = [self._peers[r].fileno() if r in self._peers else -1 for r in range(world_size)]
        self._sockets = (ctypes.c_int * world_size)(*sockets)
        spins = world_size * threads <= len(os.sched_getaffinity(0))
        self._handle = self._code.headrace_shared_open(
            self._begin, rank, world_size, SLOT_BYTES, self._sockets, spins
        )
        self._limit(LOAD_TIMEOUT)
        self._comes = False  # it may have come to a meeting without waiting for the others
        self._rooms: dict[tuple[int, int], list[torch.Tensor]] = {}

    def limit(self, seconds: float) -> float:
        self._limit(float(self.broadcast(torch.tensor([seconds], dtype=torch.float64))[0]))
        return self._seconds

    def _limit(self, seconds: float) -> None:
        self._seconds = seconds
        self._code.headrace_shared_limit(self._handle, seconds)

    def recordable(self, rows: int, width: int) -> bool:
        return rows * width <= _most()

    def run(self, calls: Callable[[int | None], int]) -> None:
        self._check(calls(self._handle))

    def room(self, rows: int, width: int) -> torch.Tensor:
        sets = self._rooms.get((rows, width))
        if sets is None:
            fits = rows * width * 4 <= SLOT_BYTES // 2  # whether or not these are two planes
            sets = [
                self._slot(number, self.rank, torch.float32, rows * width).view(rows, width)
                if fits else torch.empty((rows, width)) for number in range(2)
            ]
            self._rooms[rows, width] = sets
        return sets[self._next() & 1]

    def sum(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, halves: Sequence[int] | None = None
    ) -> torch.Tensor:
        if x.dtype != torch.float32:
            total = self.sum(x.float(), None, halves).to(x.dtype)
            return total if residual is None else residual.add_(total)
        x = x.contiguous()
        there = x.data_ptr() == self._address(self._next(), self.rank)
        planes = 2 if halves is not None and halves[self.rank] == BOTH_HALVES else 1
        out = residual if residual is not None else torch.empty_like(x[: len(x) // planes])
        count = out.numel()
        for at in range(0, count, _most()):
            size = min(count - at, _most())
            number = self._next()
            to = self._address(number, self.rank)
            for plane in range(0 if there else planes):
                ctypes.memmove(to + 4 * plane * size, x.data_ptr() + 4 * (plane * count + at), 4 * size)
            self._check(self._code.headrace_shared_sum(
                self._handle, bytes(halves) if halves else None,
                residual.data_ptr() + 4 * at if residual is not None else None, out.data_ptr() + 4 * at, size,
            ))
        return out

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        rows, width = x.shape
        most, wholes = max(1, SLOT_BYTES // (width * x.itemsize)), []
        for part in torch.split(x, most) if rows else [x]:
            number = self._next()
            self._check(self._code.headrace_shared_gather(self._handle, part.data_ptr(), len(part), width * x.itemsize))
            if self.rank == 0:
                whole = self._slot(number, 0, x.dtype, self.world_size * part.numel())
                whole = whole.view(len(part), self.world_size * width)
                wholes.append(whole.clone() if rows > most else whole)
        if self.rank:
            return x
        return torch.cat(wholes) if rows > most else wholes[0]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        for part in torch.split(x.view(-1), SLOT_BYTES // x.itemsize):
            number = self._next()
            leaders = self._slot(number, 0, x.dtype, len(part))
            if self.rank == 0:
                leaders.copy_(part)
            self._check(self._code.headrace_shared_meet(self._handle))
            if self.rank:
                part.copy_(leaders)
        return x

    def send(self, values: Ints) -> None:
        for at in range(0, len(values), _room()):
            part, address = values[at : at + _room()], self._address(self._next(), 0)
            ctypes.c_int64.from_address(address).value = len(values)
            ctypes.memmove(address + 8, part.ctypes.data, part.nbytes)
            self._come(self._handle)
            self._comes = True

    def receive(self) -> Ints:
        parts: list[Ints] = []
        while True:
            number = self._next()
            self._check(self._code.headrace_shared_meet(self._handle))
            total = ctypes.c_int64.from_address(self._address(number, 0)).value
            left = total - sum(map(len, parts))
            here = self._slot(number, 0, torch.int64, 1 + min(left, _room()))
            parts.append(here.numpy()[1:].copy())
            if left <= _room():
                return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _next(self) -> int:
        """The number of the meeting that is prepared now."""
        if self._comes:
            self._check(self._code.headrace_shared_wait(self._handle))
            self._comes = False
        return self._meetings(self._handle) + 1

    def _offset(self, number: int, rank: int) -> int:
        return self._control + ((number & 1) * self.world_size + rank) * SLOT_BYTES

    def _address(self, number: int, rank: int) -> int:
        return self._begin + self._offset(number, rank)

    def _slot(self, number: int, rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        at = self._offset(number, rank)
        return self._memory[at : at + count * dtype.itemsize].view(dtype)

    def _check(self, outcome: int) -> None:
        if outcome:
            rank = outcome & 0xFFFF
            why = "has ended" if outcome >> 16 == ENDED else f"did not answer for {self._seconds:.0f} s"
            raise GroupBroken(f"rank {self.rank} of {self.world_size} lost another rank: rank {rank} {why}")


def _most() -> int:
    """Numbers of a sum that go at once: two planes fit into a slot."""
    return SLOT_BYTES // 8


def _room() -> int:
    """Integers of a message that go at once, behind its length."""
    return SLOT_BYTES // 8 - 1


def _functions() -> tuple[ctypes.CDLL, Callable[[int], int], Callable[[int], None]]:
    """The compiled functions; "meetings" and "come" apart: they keep the GIL, which others would not give back soon.

    Raises:
        BuildFailed: there are none.
    """
    code = load_code()
    address, number, reason = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    for name, result, *arguments in (
        ("control_bytes", number, ctypes.c_int),
        ("open", address, address, ctypes.c_int, ctypes.c_int, number, address, ctypes.c_int),
        ("limit", None, address, ctypes.c_double),
        ("meet", reason, address),
        ("wait", reason, address),
        ("gather", reason, address, address, number, number),
        ("sum", reason, address, ctypes.c_char_p, address, address, number),
    ):
        function = getattr(code, f"headrace_shared_{name}")
        function.argtypes, function.restype = arguments, result
    meetings = ctypes.PYFUNCTYPE(ctypes.c_uint64, address)(("headrace_shared_meetings", code))
    return code, meetings, ctypes.PYFUNCTYPE(None, address)(("headrace_shared_come", code))
