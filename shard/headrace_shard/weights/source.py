"""What a model file asks of its weights."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Table(Protocol):
    """A matrix of which a few rows are wanted at a time. It stays in the file, which is memory-mapped."""

    def take(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """These rows, [len(rows), columns], in the data type of the file (float32 for quantized ones)."""


class WeightSource(Protocol):
    """Named tensors under the names that `transformers` checkpoints use."""

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

    def table(self, name: str, shape: tuple[int, int]) -> Table:
        """A whole matrix, for look-ups; raises as `get` does."""

    def release(self) -> None:
        """All has been read: give up the memory that reading has taken. Tables stay usable."""
