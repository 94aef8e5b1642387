"""Calls of the kernels, recorded once and made again from C, with the GIL released and no Python in between."""

from __future__ import annotations

import ctypes
from typing import ClassVar

LINEAR, MLP, ATTENTION, SUM = range(4)


class Call(ctypes.Structure):
    """One call; src/types.h declares the same. Arguments are in the kernel's order, the numbers of rows left out."""

    _fields_: ClassVar = [("function", ctypes.c_int64), ("arguments", ctypes.c_int64 * 6)]


class Recording:
    """Stands where a `Library` stands while a pass is recorded; nothing is computed."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def linear(
        self, x: int, rows: int, prompts: int, norm: int | None, parts: int, count: int, residual: int | None,
        out: int | None,
    ) -> None:
        self._add(LINEAR, x, norm, parts, count, residual, out)

    def mlp(
        self, x: int, rows: int, prompts: int, norm: int | None, gate_up: int, down: int, residual: int | None,
        out: int | None,
    ) -> None:
        self._add(MLP, x, norm, gate_up, down, residual, out)

    def attention(self, qkv: int, heads: int, tiles: int, cache: int, out: int) -> None:
        self._add(ATTENTION, qkv, heads, tiles, cache, out)

    def sum(self, halves: int | None, residual: int | None, out: int, columns: int) -> None:
        """out = [residual +] the sum over the ranks of what the call before wrote, its `out` being None."""
        self._add(SUM, halves, residual, out, columns)

    def _add(self, function: int, *arguments: int | None) -> None:
        self._calls.append(Call(function, (ctypes.c_int64 * 6)(*(argument or 0 for argument in arguments))))

    def calls(self) -> ctypes.Array[Call]:
        """What was recorded, for `Library.run`."""
        return (Call * len(self._calls))(*self._calls)
