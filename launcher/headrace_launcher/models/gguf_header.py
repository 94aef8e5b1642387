"""The header of a GGUF file: metadata and the table of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's reader builds an array object
for each string of the vocabulary, which takes seconds; this one reads the values and checks that the file is whole.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace._common.errors import StartupError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor table. `shape` is in GGUF's order, fastest dimension first; `offset` is in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """Everything of a GGUF file but the tensor data."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own: `get("context_length")` is `llama.context_length`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def floats(self, name: str) -> list[float]:
        """The values of a small float32 tensor."""
        info = self.tensors[name]
        if info.kind != 0:
            raise StartupError(f"{self.path}: {name} is not float32")
        with open(self.path, "rb") as file:
            file.seek(info.offset)
            return list(struct.unpack(f"<{info.size // 4}f", file.read(info.size)))


def read(path: Path) -> Header:
    """Read and check a GGUF file's header.

    Raises:
        StartupError: it does not exist, is no GGUF file, is cut short or damaged.
    """
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise StartupError(f"{path} is not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError):
        raise StartupError(f"{path} is cut short or damaged: its header cannot be read") from None


def _parse(path: Path, data: mmap.mmap) -> Header:
    cursor = _Cursor(data)
    cursor.at = 4
    version = cursor.take("<I")
    if version not in (2, 3):
        raise StartupError(f"{path} is GGUF version {version}; versions 2 and 3 are read")
    tensor_count, pair_count = cursor.take("<Q"), cursor.take("<Q")
    metadata = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.take("<I"))
    entries = []
    for _ in range(tensor_count):
        name, dimensions = cursor.string(), cursor.take("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise IndexError("more dimensions than GGUF has")
        shape = tuple(cursor.take("<Q") for _ in range(dimensions))
        entries.append((name, shape, cursor.take("<I"), cursor.take("<Q")))
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: TensorInfo(shape, kind, start + offset, _size(path, name, shape, kind))
        for name, shape, kind, offset in entries
    }
    whole = max((info.offset + info.size for info in tensors.values()), default=start)
    if len(data) < whole:
        raise StartupError(f"{path} is cut short: it has {len(data)} bytes of {whole}")
    return Header(path, metadata, tensors)


def _size(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    """Bytes of a tensor's data."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise StartupError(f"{path}: tensor {name} is of the unknown type {kind}") from None
    count = 1
    for dimension in shape:
        count *= dimension
    return int(count // block * block_bytes)


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> Any:
        value = struct.unpack_from(form, self.data, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.take("<Q")
        text = self.data[self.at : self.at + length]
        if len(text) != length:
            raise IndexError("the file ends within a string")
        self.at += length
        return text.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise IndexError("unknown value type")
            return self.take(_SCALARS[kind])
        item, count = self.take("<I"), self.take("<Q")
        if item in _SCALARS:
            form = f"<{count}{_SCALARS[item][1]}"
            values = struct.unpack_from(form, self.data, self.at)
            self.at += struct.calcsize(form)
            return list(values)
        if count > len(self.data):
            raise IndexError("more entries than the file has bytes")
        return [self.value(item) for _ in range(count)]
