"""The ranks of one shard group and what they do together. Plain tensors only, over torch.distributed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from headrace._common.errors import HeadraceError, StartupError

LOAD_TIMEOUT = 600.0  # seconds in which all ranks must have loaded their weights


class GroupBroken(HeadraceError):
    """The group cannot run another step. `lost`: another rank is gone or does not answer; else it is this one's fault."""

    def __init__(self, message: str, lost: bool = True) -> None:
        super().__init__(message)
        self.lost = lost


class Trouble(NamedTuple):
    """Why a rank is not healthy.

    "hung": in one step for too long. "lost": another rank is gone. "failed": an error of its own.
    """

    reason: str
    kind: Literal["hung", "lost", "failed"]


class Group(Protocol):
    """Collectives of a shard group. Every rank calls them in the same order."""

    rank: int
    world_size: int

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks, on every rank; may be written into x."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """On rank 0 the parts [rows, n] of all ranks side by side, [rows, world_size n]; elsewhere x."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x into every rank's x."""


class Alone:
    """A group of one: nothing to do."""

    rank, world_size = 0, 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x


class DistributedGroup:
    """gloo on a CPU, NCCL where CUDA is. An error or a timeout in a collective is `GroupBroken`."""

    def __init__(self, rank: int, world_size: int, rendezvous: str, backend: str) -> None:
        """Meet the other ranks through a file that all of them see.

        Raises:
            StartupError: not all came within LOAD_TIMEOUT.
        """
        self.rank, self.world_size, self._backend = rank, world_size, backend
        if backend == "gloo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks of one host talk over loopback
        try:
            dist.init_process_group(
                backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size,
                timeout=timedelta(seconds=LOAD_TIMEOUT),
            )
        except (RuntimeError, ValueError) as error:
            raise StartupError(f"rank {rank} of {world_size} did not meet the others: {first_line(error)}") from None
        self._group: dist.ProcessGroup | None = None

    def limit(self, seconds: float) -> float:
        """From now on a collective that takes longer breaks the group. Rank 0's value holds, and is returned to all."""
        agreed = float(self.broadcast(torch.tensor([seconds], dtype=torch.float64))[0])
        with self._guard():
            self._group = dist.new_group(timeout=timedelta(seconds=agreed), backend=self._backend)
        self.sum(torch.zeros(1))  # all are in it: from here on nobody reads the rendezvous file
        return agreed

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        with self._guard():
            dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.world_size)] if self.rank == 0 else None
        with self._guard():
            dist.gather(x, parts, dst=0, group=self._group)
        return torch.cat(parts, dim=-1) if parts else x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        with self._guard():
            dist.broadcast(x, src=0, group=self._group)
        return x

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise GroupBroken(f"rank {self.rank} of {self.world_size} lost another rank: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """What happened, without the source places and stacks that torch's messages carry."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\.(?:cc|cpp|h|hpp):\d+\] ?", "", line).split(". This is typically")[0]
