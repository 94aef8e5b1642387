"""GGUF's quantized blocks to float32.

The formats that people serve most are unpacked here, a whole tensor at once; the `gguf` package, which goes through
sixteen rows at a time, does the others. Layouts: ggml's `block_q4_0`, `block_q4_1`, `block_q8_0`.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, BF16 = 0, 1, 2, 3, 8, 12, 30


class UnknownType(Exception):
    """A GGUF tensor type that cannot be read; names it."""


def type_name(kind: int) -> str:
    """The name of a known GGUF tensor type, such as "Q4_K"."""
    from gguf.constants import GGMLQuantizationType

    return str(GGMLQuantizationType(kind).name)


@functools.cache
def block_layout(kind: int) -> tuple[int, int]:
    """(values, bytes) of one block of a GGUF tensor type.

    Raises:
        UnknownType: no such type.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except ValueError:
        raise UnknownType(f"GGUF tensor type {kind}") from None
    return int(values), int(size)


def dequantize(raw: Bytes, kind: int) -> Floats:
    """Values of consecutive blocks, flat.

    Raises:
        UnknownType: nobody here can unpack this type.
    """
    if kind == F32:
        return raw.view(np.float32).copy()
    if kind == F16:
        return raw.view(np.float16).astype(np.float32)
    if kind == BF16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind in (Q4_0, Q4_1, Q8_0):
        return _BLOCKS[kind](raw.reshape(-1, block_layout(kind)[1])).reshape(-1)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as by_package

    blocks = raw.reshape(-1, block_layout(kind)[1])
    try:
        return np.array(by_package(blocks, GGMLQuantizationType(kind)), dtype=np.float32).reshape(-1)
    except NotImplementedError:  # the package's own
        raise UnknownType(f"GGUF tensor type {type_name(kind)}") from None


def _scale(blocks: Bytes, at: int) -> Floats:
    """A half-precision number of each block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """[blocks, 16] bytes to [blocks, 32] values: the low halves, then the high halves."""
    out = np.empty((len(packed), 32), dtype=np.float32)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


def _q4_0(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _scale(blocks, 0)
    return values


def _q4_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 4:])
    values *= _scale(blocks, 0)
    values += _scale(blocks, 2)
    return values


def _q8_0(blocks: Bytes) -> Floats:
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _scale(blocks, 0)
    return values


_BLOCKS = {Q4_0: _q4_0, Q4_1: _q4_1, Q8_0: _q8_0}
