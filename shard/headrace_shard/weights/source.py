"""What a model file asks of its weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Blocks:
    """Rows of a quantized matrix as the file holds them, for a backend that computes with its blocks.

    Attributes:
        kind: the GGUF tensor type.
        raw: [rows of the file, bytes of a row]; mapped, not read yet.
        order: which row of the file comes as i-th; -1 stands for a row of zeros.
        first_block, blocks: the blocks (of 32 columns) that are wanted of each row.
    """

    kind: int
    raw: npt.NDArray[np.uint8]
    order: npt.NDArray[np.int64]
    first_block: int
    blocks: int

    @property
    def rows(self) -> int:
        return len(self.order)

    @property
    def columns(self) -> int:
        return self.blocks * 32


class Table(Protocol):
    """A matrix of which a few rows are wanted at a time. It stays in the file, which is memory-mapped."""

    def take(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """These rows, [len(rows), columns], in the data type of the file (float32 for quantized ones)."""


class WeightSource(Protocol):
    """Named tensors under the names that `transformers` checkpoints use."""

    quantization: str | None  # format of most weights, such as "q4_1", if a backend can compute with them as they are

    def names(self) -> frozenset[str]:
        """All tensor names."""

    def get(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """A tensor, or the given rows or columns of it, in the data type of the file (float32 for quantized ones).

        `shape` is that of the whole tensor. Only what is asked for is read.

        Raises:
            StartupError: it is missing, has another shape, or its file is damaged.
        """

    def matrix(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None,
        kinds: Collection[int] = (),
    ) -> torch.Tensor | Blocks:
        """As `get`; as blocks if the tensor is of one of these GGUF types and is cut between blocks."""

    def table(self, name: str, shape: tuple[int, int]) -> Table:
        """A whole matrix, for look-ups; raises as `get` does."""

    def release(self) -> None:
        """All has been read: give up the memory that reading has taken. Tables stay usable."""
