"""The ranks of one host over shared memory: a part is computed where the others read it (kernels/src/shared.cpp)."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from headrace_shard.kernels.library import load_code
from headrace_shard.parallel import rendezvous
from headrace_shard.parallel.group import BOTH_HALVES, LOAD_TIMEOUT, GroupBroken

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
        self._code = _functions()
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
        sockets = [self._peers[r].fileno() if r in self._peers else -1 for r in range(world_size)]
        self._sockets = (ctypes.c_int * world_size)(*sockets)
        spins = world_size * threads <= len(os.sched_getaffinity(0))
        self._handle = self._code.headrace_shared_open(
            self._memory.data_ptr(), rank, world_size, SLOT_BYTES, self._sockets, spins
        )
        self._limit(LOAD_TIMEOUT)
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
        there = x.data_ptr() == self._address(self._next())
        planes = 2 if halves is not None and halves[self.rank] == BOTH_HALVES else 1
        out = residual if residual is not None else torch.empty_like(x[: len(x) // planes])
        count = out.numel()
        for at in range(0, count, _most()):
            size = min(count - at, _most())
            number = self._next()
            for plane in range(0 if there else planes):
                ctypes.memmove(self._address(number) + 4 * plane * size, x.data_ptr() + 4 * (plane * count + at), 4 * size)
            self._check(self._code.headrace_shared_sum(
                self._handle, bytes(halves) if halves else None,
                residual.data_ptr() + 4 * at if residual is not None else None, out.data_ptr() + 4 * at, size,
            ))
        return out

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        rows, width = x.shape
        pieces = []
        for part in torch.split(x, max(1, SLOT_BYTES // (width * x.itemsize))) if rows else [x]:
            number = self._next()
            if part.data_ptr() != self._address(number):
                self._slot(number, self.rank, x.dtype, part.numel()).copy_(part.view(-1))
            self._meet()
            if self.rank == 0:
                parts = [self._slot(number, r, x.dtype, part.numel()).view(-1, width) for r in range(self.world_size)]
                pieces.append(torch.cat(parts, dim=-1))
        if self.rank:
            return x
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        for part in torch.split(x.view(-1), SLOT_BYTES // x.itemsize):
            number = self._next()
            leaders = self._slot(number, 0, x.dtype, len(part))
            if self.rank == 0:
                leaders.copy_(part)
            self._meet()
            if self.rank:
                part.copy_(leaders)
        return x

    def _next(self) -> int:
        """The number of the meeting that is prepared now."""
        return int(self._code.headrace_shared_meetings(self._handle)) + 1

    def _offset(self, number: int, rank: int) -> int:
        return self._control + ((number & 1) * self.world_size + rank) * SLOT_BYTES

    def _address(self, number: int) -> int:
        return int(self._memory.data_ptr()) + self._offset(number, self.rank)

    def _slot(self, number: int, rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        at = self._offset(number, rank)
        return self._memory[at : at + count * dtype.itemsize].view(dtype)

    def _meet(self) -> None:
        self._check(self._code.headrace_shared_meet(self._handle))

    def _check(self, outcome: int) -> None:
        if outcome:
            rank = outcome & 0xFFFF
            why = "has ended" if outcome >> 16 == ENDED else f"did not answer for {self._seconds:.0f} s"
            raise GroupBroken(f"rank {self.rank} of {self.world_size} lost another rank: rank {rank} {why}")


def _most() -> int:
    """Numbers of a sum that go at once: two planes fit into a slot."""
    return SLOT_BYTES // 8


def _functions() -> ctypes.CDLL:
    """The compiled functions; raises BuildFailed."""
    code = load_code()
    address, number, reason = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    for name, result, *arguments in (
        ("control_bytes", number, ctypes.c_int),
        ("open", address, address, ctypes.c_int, ctypes.c_int, number, address, ctypes.c_int),
        ("meetings", ctypes.c_uint64, address),
        ("limit", None, address, ctypes.c_double),
        ("meet", reason, address),
        ("sum", reason, address, ctypes.c_char_p, address, address, number),
    ):
        function = getattr(code, f"headrace_shared_{name}")
        function.argtypes, function.restype = arguments, result
    return code
