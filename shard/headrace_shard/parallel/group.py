"""The ranks of one shard group and what they do together. Plain tensors only."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch

from headrace._common.errors import HeadraceError
from headrace_shard.step import Ints

BOTH_HALVES = 3  # see `Group.sum`
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

    def room(self, rows: int, width: int) -> torch.Tensor:
        """Memory [rows, width], float32, for this rank's x of the next `sum`, which then has less to copy."""

    def sum(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, halves: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The sum of x over all ranks, and of `residual`, on every rank; may be written into x or `residual`.

        `halves`: for each rank, in which halves of the sum its x has a part: 1 the first, 2 the second. A rank with both (3)
        gives x [2 rows, n], the two parts one below the other. Each half is summed in the order of the ranks, then both.

        Raises:
            GroupBroken: another rank has ended, or does not answer; as all collectives.
        """

    def recordable(self, rows: int, width: int) -> bool:
        """Whether sums of [rows, width] can be among the calls that `run` makes; the same on every rank."""

    def run(self, calls: Callable[[int | None], int]) -> None:
        """Make recorded calls of the CPU kernels, `Library.run` with what it must know of the group; only if `recordable`."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """On rank 0 the parts [rows, n] of all ranks side by side, [rows, world_size n], until the collective after the
        next; elsewhere x.
        """

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x into every rank's x."""

    def send(self, values: Ints) -> None:
        """Rank 0: bring integers to all others. It need not wait for them; what it does next with them does."""

    def receive(self) -> Ints:
        """Another rank: what rank 0 sent."""

    def limit(self, seconds: float) -> float:
        """From now on a collective that takes longer breaks the group. Rank 0's value holds, and is returned to all."""


class Alone:
    """A group of one: nothing to do."""

    rank, world_size = 0, 1

    def room(self, rows: int, width: int) -> torch.Tensor:
        return torch.empty((rows, width))

    def sum(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, halves: Sequence[int] | None = None
    ) -> torch.Tensor:
        return x if residual is None else residual.add_(x)

    def recordable(self, rows: int, width: int) -> bool:
        return True

    def run(self, calls: Callable[[int | None], int]) -> None:
        calls(None)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def send(self, values: Ints) -> None:
        pass

    def receive(self) -> Ints:
        raise AssertionError("a group of one has no rank that receives")

    def limit(self, seconds: float) -> float:
        return seconds


def first_line(error: Exception) -> str:
    """What happened, without the source places and stacks that torch's messages carry."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\.(?:cc|cpp|h|hpp):\d+\] ?", "", line).split(". This is typically")[0]
