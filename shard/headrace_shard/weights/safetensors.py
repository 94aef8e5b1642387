"""Weights in one or several .safetensors files."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from headrace._common.errors import StartupError

INDEX = "model.safetensors.index.json"


class SafetensorsWeights:
    """Tensors of a folder, memory-mapped and read when asked for."""

    def __init__(self, folder: Path) -> None:
        """Open every file that the index names, else every .safetensors file of the folder.

        Raises:
            StartupError: no file, a missing or a damaged one.
        """
        self.quantization: str | None = None
        self._handles: dict[str, tuple[Path, Any]] = {}
        for path in weight_files(folder):
            try:
                handle = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise StartupError(f"cannot read the weights in {path}: {error}") from None
            for name in handle.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - not a mapping
                self._handles[name] = (path, handle)

    def names(self) -> frozenset[str]:
        return frozenset(self._handles)

    def get(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        path, handle = self._find(name, shape)
        try:
            whole = handle.get_slice(name)
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
        kinds: Collection[int] = (),
    ) -> torch.Tensor:
        return self.get(name, shape, rows, columns)

    def table(self, name: str, shape: tuple[int, int]) -> MappedTable:
        path, handle = self._find(name, shape)
        try:
            return MappedTable(handle.get_tensor(name))
        except (SafetensorError, OSError, ValueError) as error:
            raise StartupError(f"cannot read tensor {name} of {path}: {error}") from None

    def release(self) -> None:
        self._handles.clear()

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[Path, Any]:
        """The file that holds a tensor of this name and shape, and its handle."""
        if name not in self._handles:
            raise StartupError(f"the weights have no tensor {name}")
        path, handle = self._handles[name]
        found = tuple(handle.get_slice(name).get_shape())
        if found != shape:
            raise StartupError(f"tensor {name} of {path} has shape {found}; the config asks for {shape}")
        return path, handle


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
