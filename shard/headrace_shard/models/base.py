"""What the rest of a shard knows of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from headrace_shard.backends.base import AttentionShape, Backend
from headrace_shard.step import StepInput
from headrace_shard.weights import WeightSource


class Model(ABC):
    """A decoder over flat, ragged steps."""

    layers: int
    vocab_size: int
    attention: AttentionShape  # of this rank

    @abstractmethod
    def __init__(
        self, config: dict[str, Any], weights: WeightSource, backend: Backend, rank: int, world_size: int
    ) -> None:
        """Read the config and pack the weights of this rank.

        Raises:
            StartupError: the config asks for something that this family has not, or the weights do not fit it.
        """

    @classmethod
    @abstractmethod
    def check_partition(cls, config: dict[str, Any], world_size: int) -> None:
        """Raises StartupError if the model cannot be cut into so many parts."""

    @abstractmethod
    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits of the rows that the step wants: [logit rows, vocab], float32, until the next step. Writes the step's K and V.

        Every rank runs the same steps in the same order; the logits are whole on rank 0 alone.
        """
