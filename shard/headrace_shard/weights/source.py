"""What a model file asks of its weights."""

from __future__ import annotations

from typing import Protocol

import torch


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
