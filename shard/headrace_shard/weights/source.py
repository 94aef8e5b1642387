"""What a model file asks of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace_shard.weights.precision import EXACT, GROUP, Format, Precision


@dataclass(frozen=True)
class Blocks:
    """Rows of a quantized matrix as the file holds them, for a backend that computes with its blocks.

    Attributes:
        kind: the GGUF tensor type.
        raw: [rows of the file, bytes of a row]; mapped, not read yet.
        order: which row of the file comes as i-th; -1 stands for a row of zeros.
        first_group, groups: the groups of 32 columns that are wanted of each row.
    """

    kind: int
    raw: npt.NDArray[np.uint8]
    order: npt.NDArray[np.int64]
    first_group: int
    groups: int

    @property
    def rows(self) -> int:
        return len(self.order)

    @property
    def columns(self) -> int:
        return self.groups * GROUP


@dataclass(frozen=True)
class Dense:
    """Values of a matrix for a backend that packs them, some rows at a time.

    Attributes:
        rows, columns: its size. Rows that `read` does not have are zeros.
        format: in which it is to be held.
        read: these rows, [len(range), columns], in the data type of the file (float32 for quantized ones).
    """

    rows: int
    columns: int
    format: Format
    read: Callable[[range], torch.Tensor]
    stored: int  # rows that `read` has

    @classmethod
    def of(cls, values: torch.Tensor, format_: Format = Format.FLOAT32) -> Dense:
        """A matrix that is in memory."""
        rows, columns = values.shape
        return cls(rows, columns, format_, lambda part: values[part.start : part.stop], rows)

    def whole(self) -> torch.Tensor:
        """All rows, [rows, columns]."""
        values = self.read(range(self.stored))
        missing = self.rows - self.stored
        return torch.nn.functional.pad(values, (0, 0, 0, missing)) if missing else values


def with_zero_rows(matrix: Blocks | Dense, count: int) -> Blocks | Dense:
    """The matrix with so many more rows, of zeros."""
    if isinstance(matrix, Dense):
        return replace(matrix, rows=matrix.rows + count)
    return replace(matrix, order=np.pad(matrix.order, (0, count), constant_values=-1))


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

    def matrix(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None,
        precision: Precision = EXACT, head: bool = False,
    ) -> Blocks | Dense:
        """As `get`, to be held as `precision` says. A cut between groups, which would need other scales than the whole
        matrix has, is held in floats. `head`: it is the output head."""

    def table(self, name: str, shape: tuple[int, int]) -> Table:
        """A whole matrix, for look-ups; raises as `get` does."""

    def release(self) -> None:
        """Give up the memory that reading has taken so far. Everything stays usable."""
