"""Weights in one or several .safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from headrace._common.errors import StartupError
from headrace_shard.weights.dequantize import BF16, F16, F32
from headrace_shard.weights.precision import EXACT, GROUP, Precision
from headrace_shard.weights.source import Dense

_KINDS = {torch.bfloat16: BF16, torch.float16: F16}
INDEX = "model.safetensors.index.json"


class SafetensorsWeights:
    """Tensors of a folder, memory-mapped and read when asked for."""

    def __init__(self, folder: Path) -> None:
        """Open every file that the index names, else every .safetensors file of the folder.

        Raises:
            StartupError: no file, a missing or a damaged one.
        """
        self._paths: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        for path in weight_files(folder):
            self._paths |= dict.fromkeys(self._handle(path).keys(), path)

    def names(self) -> frozenset[str]:
        return frozenset(self._paths)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, as its file has it."""
        return tuple(self._handle(self._path(name)).get_slice(name).get_shape())

    def get(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        path = self._path(name)
        try:
            whole = self._handle(path).get_slice(name)
            _check_shape(path, name, tuple(whole.get_shape()), shape)
            if columns is not None:
                tensor: torch.Tensor = whole[:, columns.start : columns.stop]
            else:
                part = rows if rows is not None else range(shape[0])
                tensor = whole[part.start : part.stop]
        except (SafetensorError, OSError, ValueError) as error:
            raise StartupError(f"cannot read tensor {name} of {path}: {error}") from None
        return tensor

    def matrix(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None,
        precision: Precision = EXACT, head: bool = False,
    ) -> Dense:
        values = self.get(name, shape, rows, columns)  # not read yet: they are mapped
        cut = columns if columns is not None else range(shape[1])
        whole_groups = cut.start % GROUP == cut.stop % GROUP == 0
        return Dense.of(values, precision.format_of(_KINDS.get(values.dtype, F32), head, whole_groups))

    def table(self, name: str, shape: tuple[int, int]) -> MappedTable:
        path = self._path(name)
        try:
            tensor = _open(path).get_tensor(name)  # a mapping of its own: it holds no page that others have read
        except (SafetensorError, OSError, ValueError) as error:
            raise StartupError(f"cannot read tensor {name} of {path}: {error}") from None
        _check_shape(path, name, tuple(tensor.shape), shape)
        return MappedTable(tensor)

    def release(self) -> None:
        self._handles.clear()  # they are opened again when somebody asks

    def _path(self, name: str) -> Path:
        """The file that holds a tensor of this name."""
        if name not in self._paths:
            raise StartupError(f"the weights have no tensor {name}")
        return self._paths[name]

    def _handle(self, path: Path) -> Any:
        if (handle := self._handles.get(path)) is None:
            handle = self._handles[path] = _open(path)
        return handle


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise StartupError(f"cannot read the weights in {path}: {error}") from None


def _check_shape(path: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise StartupError(f"tensor {name} of {path} has shape {found}; the config asks for {expected}")


class MappedTable:
    """Rows of a tensor that lies in a memory-mapped file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def take(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        return self._tensor[torch.from_numpy(rows)]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        StartupError: none, or one that the index names is missing.
    """
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        missing = [n for n in names if not (folder / n).is_file()]
        if missing:
            raise StartupError(f"{index} names {missing[0]}, which is not in the folder")
        return [folder / n for n in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StartupError(f"{folder} has no .safetensors weights")
    return files
