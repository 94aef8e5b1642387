"""Weights in a GGUF file, memory-mapped and dequantized tensor by tensor.

`gguf.GGUFReader` decodes every string of the vocabulary (seconds); only the tensor index is needed here.
Format: the GGUF specification, version 2 and 3.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_shard.weights.dequantize import Bytes, Floats, UnknownType, block_layout, dequantize
from headrace_shard.weights.precision import AS_BLOCKS, EXACT, GROUP, OWN, Precision
from headrace_shard.weights.source import Blocks, Dense

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_ALIGNMENT_KEY = "general.alignment"

_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Entry:
    """One tensor of the index: `shape` is (rows, ..., columns) as torch writes it."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufWeights:
    """Tensors of a GGUF file under the names of `transformers` checkpoints, dequantized to float32 or as blocks."""

    def __init__(self, path: Path, folder: ModelFolder) -> None:
        """Read the tensor index.

        Raises:
            StartupError: not a GGUF file, or cut off.
        """
        self._path = path
        try:
            with open(path, "rb") as file:
                self._architecture, self.entries, self._start = _read_index(file)
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError, struct.error) as error:
            raise StartupError(f"cannot read the GGUF file {path}: {error}") from None
        config = folder.text_config
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = int(config.get("num_key_value_heads") or self._heads)

    def names(self) -> frozenset[str]:
        names = {ours for ours, theirs in _OUTSIDE.items() if theirs in self.entries}
        back = {v: k for k, v in _IN_LAYER.items()}
        for name in self.entries:
            parts = name.split(".")
            if parts[0] == "blk" and parts[2] in back:
                names.add(f"model.layers.{parts[1]}.{back[parts[2]]}.{parts[3]}")
        return frozenset(names)

    def get(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        raw, entry = self._raw(name, shape)
        if len(shape) == 1:
            return self._columns(raw, entry, rows if rows is not None else range(shape[0]), name)[0]
        places = self._places(name, shape, rows if rows is not None else range(shape[0]))
        return self._columns(raw, entry, columns if columns is not None else range(shape[1]), name, places)

    def _columns(
        self, raw: Bytes, entry: Entry, cut: range, name: str, places: npt.NDArray[np.int64] | slice = slice(None)
    ) -> torch.Tensor:
        """These columns of these rows of raw bytes: whole blocks first, then the columns among them."""
        block, size = block_layout(entry.kind)
        first, last = cut.start // block, -(-cut.stop // block)
        values = torch.from_numpy(self._unpack(raw[:, first * size : last * size][places], entry, name))
        return values[:, cut.start - first * block : cut.stop - first * block]

    def matrix(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None,
        precision: Precision = EXACT, head: bool = False,
    ) -> Blocks | Dense:
        raw, entry = self._raw(name, shape)
        cut = columns if columns is not None else range(shape[1])
        places = self._places(name, shape, rows if rows is not None else range(shape[0]))
        format_ = precision.format_of(entry.kind, head, cut.start % GROUP == cut.stop % GROUP == 0)
        if entry.kind in AS_BLOCKS and format_ == OWN.format_of(entry.kind):
            return Blocks(entry.kind, raw, places, cut.start // GROUP, len(cut) // GROUP)
        self._unpack(raw[:1], entry, name)  # whether it can be

        def read(part: range) -> torch.Tensor:
            return self._columns(raw, entry, cut, name, places[part.start : part.stop])

        return Dense(len(places), len(cut), format_, read, len(places))

    def _places(self, name: str, shape: tuple[int, ...], rows: range) -> npt.NDArray[np.int64]:
        """Which rows of the file these rows are."""
        match = re.search(r"self_attn\.([qk])_proj", name)
        places = torch.arange(rows.start, rows.stop)
        if self._architecture == "llama" and match is not None:
            dim = shape[0] // (self._heads if match[1] == "q" else self._kv_heads)
            # llama.cpp interleaves the two rotary halves of each head of Llama's q and k: one after the other here.
            places = places.reshape(-1, dim // 2, 2).swapaxes(1, 2).reshape(-1)
        return places.numpy()

    def table(self, name: str, shape: tuple[int, int]) -> PackedTable:
        raw, entry = self._raw(name, shape)
        self._unpack(raw[:1], entry, name)
        return PackedTable(raw, entry.kind)

    def release(self) -> None:
        mapped = self._data._mmap  # type: ignore[attr-defined]  # numpy does not declare it
        mapped.madvise(mmap.MADV_DONTNEED)

    def _raw(self, name: str, shape: tuple[int, ...]) -> tuple[Bytes, Entry]:
        """A tensor's bytes in the file, [rows, bytes of a row]."""
        theirs = gguf_name(name)
        if theirs not in self.entries:
            raise StartupError(f"{self._path} has no tensor {theirs} ({name})")
        entry = self.entries[theirs]
        if entry.shape != shape:
            raise StartupError(f"tensor {theirs} of {self._path} has shape {entry.shape}; the config asks for {shape}")
        try:
            block, size = block_layout(entry.kind)
        except UnknownType as error:
            raise StartupError(f"{theirs} of {self._path}: {error} is not known") from None
        row_bytes = shape[-1] // block * size
        begin, length = self._start + entry.offset, prod(shape[:-1]) * row_bytes
        if begin + length > len(self._data):
            raise StartupError(f"{self._path} is cut off: tensor {theirs} ends beyond the file")
        return np.asarray(self._data[begin : begin + length]).reshape(-1, row_bytes), entry

    def _unpack(self, raw: Bytes, entry: Entry, name: str) -> Floats:
        """Values of rows of raw bytes: [rows, values]."""
        try:
            return dequantize(np.ascontiguousarray(raw).reshape(-1), entry.kind).reshape(len(raw), -1)
        except UnknownType as error:
            raise StartupError(f"{gguf_name(name)} of {self._path}: {error} cannot be unpacked") from None


class PackedTable:
    """Rows of a quantized matrix that stays packed in the memory-mapped file."""

    def __init__(self, raw: Bytes, kind: int) -> None:
        self._raw, self._kind = raw, kind

    def take(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(dequantize(self._raw[rows].reshape(-1), self._kind).reshape(len(rows), -1))


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor that `transformers` calls `name`; `name` itself if there is none."""
    if match := _LAYER_NAME.fullmatch(name):
        return f"blk.{match[1]}.{_IN_LAYER.get(match[2], match[2])}.{match[3]}"
    return _OUTSIDE.get(name, name)


def _read_index(file: BinaryIO) -> tuple[str, dict[str, Entry], int]:
    """(architecture, tensors by GGUF name, where tensor data begins)."""

    def number(code: str) -> int:
        data = file.read(struct.calcsize(code))
        return int(struct.unpack("<" + code, data)[0])

    def text() -> bytes:
        length = number("Q")
        data = file.read(length)
        if len(data) < length:
            raise ValueError("it ends within a string")
        return data

    def skip(kind: int) -> None:
        if kind == _STRING:
            file.seek(number("Q"), 1)
        elif kind == _ARRAY:
            item, count = number("I"), number("Q")
            if item in _SCALAR_BYTES:
                file.seek(count * _SCALAR_BYTES[item], 1)
            else:
                for _ in range(count):
                    skip(item)
        elif kind in _SCALAR_BYTES:
            file.seek(_SCALAR_BYTES[kind], 1)
        else:
            raise ValueError(f"unknown value type {kind}")

    if file.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = number("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}; 2 and 3 are read")
    tensors, pairs = number("Q"), number("Q")
    architecture, alignment = "", 32
    for _ in range(pairs):
        key, kind = text().decode(), number("I")
        if key == "general.architecture":
            architecture = text().decode()
        elif key == _ALIGNMENT_KEY:
            alignment = number("I")
        else:
            skip(kind)
    entries = {}
    for _ in range(tensors):
        name = text().decode()
        shape = tuple(number("Q") for _ in range(number("I")))[::-1]
        entries[name] = Entry(shape, number("I"), number("Q"))
    return architecture, entries, -(-file.tell() // alignment) * alignment
