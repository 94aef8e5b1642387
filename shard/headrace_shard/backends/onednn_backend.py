"""float32 on a CPU through oneDNN: weights are laid out for it once, which is about 1.7 times as fast as plain products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace_shard.backends.base import Part
from headrace_shard.backends.torch_backend import Linear, TorchBackend
from headrace_shard.parallel.partition import Runs
from headrace_shard.weights.source import Table


@dataclass(frozen=True)
class PackedLinear(Linear):
    """`weight` is opaque: only oneDNN reads its layout."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


@dataclass(frozen=True)
class MappedEmbedding:
    """Rows are read where they lie in the model's file, by every rank, whichever the token: a tied table is in memory
    once, packed for the head.
    """

    table: Table

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table.take(ids.numpy()).float()


class OneDnnBackend(TorchBackend):
    """The torch backend with packed linear layers."""

    def pack_embedding(self, table: Table, ids: range) -> MappedEmbedding:  # type: ignore[override]
        return MappedEmbedding(table)

    def embed(self, table: MappedEmbedding) -> torch.Tensor:  # type: ignore[override]
        return table(self._ids)

    @staticmethod
    def available(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this machine and data type have the packed path."""
        return device.type == "cpu" and dtype == torch.float32 and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]

    def pack_linear(
        self, parts: Sequence[Part], biases: Sequence[torch.Tensor] | None = None, runs: Runs | None = None
    ) -> Linear:
        plain = super().pack_linear(parts, biases)
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(plain.weight.contiguous()), plain.bias)
