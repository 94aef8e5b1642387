"""The ranks of a group over torch.distributed: NCCL for what lies on GPUs, gloo for what lies in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from headrace._common.errors import StartupError
from headrace_shard.parallel import descriptor
from headrace_shard.parallel.group import BOTH_HALVES, LOAD_TIMEOUT, GroupBroken, first_line
from headrace_shard.step import Ints


class DistributedGroup:
    """Collectives on GPUs' and on the host's tensors. An error or a timeout in one is `GroupBroken`."""

    def __init__(self, rank: int, world_size: int, rendezvous: str, device: torch.device) -> None:
        """Meet the other ranks through a file that all of them see.

        Raises:
            StartupError: not all came within LOAD_TIMEOUT.
        """
        self.rank, self.world_size, self._device = rank, world_size, device
        self._backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self._rendezvous = Path(rendezvous)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks of one host talk over loopback
        try:
            dist.init_process_group(
                self._backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size,
                timeout=timedelta(seconds=LOAD_TIMEOUT),
            )
        except (RuntimeError, ValueError) as error:
            raise StartupError(f"rank {rank} of {world_size} did not meet the others: {first_line(error)}") from None
        self._group: dist.ProcessGroup | None = None

    def limit(self, seconds: float) -> float:
        agreed = float(self.broadcast(torch.tensor([seconds], dtype=torch.float64))[0])
        with self._guard():
            self._group = dist.new_group(timeout=timedelta(seconds=agreed), backend=self._backend)
        self.sum(torch.zeros(1, device=self._device))  # all are in it: from here on nobody reads the rendezvous file
        self._rendezvous.unlink(missing_ok=True)
        return agreed

    def room(self, rows: int, width: int) -> torch.Tensor:
        return torch.empty((rows, width))

    def sum(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, halves: Sequence[int] | None = None
    ) -> torch.Tensor:
        if halves is not None and halves[self.rank] == BOTH_HALVES:  # the order is torch's own in any case
            x = x[: len(x) // 2] + x[len(x) // 2 :]
        with self._guard():
            dist.all_reduce(x, group=self._group)
        return x if residual is None else residual.add_(x)

    def recordable(self, rows: int, width: int) -> bool:
        return False

    def run(self, calls: Callable[[int | None], int]) -> None:
        raise AssertionError("sums of torch.distributed are not recordable")

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

    def send(self, values: Ints) -> None:
        descriptor.send(self, values)

    def receive(self) -> Ints:
        return descriptor.receive(self)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise GroupBroken(f"rank {self.rank} of {self.world_size} lost another rank: {first_line(error)}") from None
