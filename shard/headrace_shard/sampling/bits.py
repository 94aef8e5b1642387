"""Sets of tokens as bits: uint32 words, the lowest bit of a word first. A token beyond the words is not among them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bits: TypeAlias = npt.NDArray[np.uint32]  # [words]


def none_of(words: int) -> Bits:
    """An empty set."""
    return np.zeros(words, dtype=np.uint32)


def has(bits: Bits, token: int) -> bool:
    return token >> 5 < len(bits) and bool(int(bits[token >> 5]) >> (token & 31) & 1)


def add(bits: Bits, token: int) -> None:
    bits[token >> 5] |= np.uint32(1 << (token & 31))


def discard(bits: Bits, token: int) -> None:
    if token >> 5 < len(bits):
        bits[token >> 5] &= ~np.uint32(1 << (token & 31))


def cut(bits: Bits, count: int) -> None:
    """Leave only tokens below `count`."""
    if count < 32 * len(bits):
        bits[count >> 5] &= np.uint32((1 << (count & 31)) - 1)
        bits[(count >> 5) + 1 :] = 0


def tokens_of(bits: Bits) -> npt.NDArray[np.int64]:
    """The ids of all tokens."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
