"""What a model file asks of its weights."""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    """Named tensors under the names that `transformers` checkpoints use."""

    def names(self) -> frozenset[str]:
        """All tensor names."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of this name, in the data type that the file gives (float32 for quantized ones).

        Raises:
            StartupError: it is missing, has another shape, or its file is damaged.
        """
