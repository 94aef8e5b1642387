"""In which format a backend holds each matrix: what its file has, and what `--dtype` or `--quantize` asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from headrace_shard.weights.dequantize import BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q8_0

GROUP = 32  # columns that share a scale


class Format(IntEnum):
    """How a matrix is held; numbered as in kernels/src/types.h."""

    FLOAT32 = 0
    INT8 = 1  # a scale for each group of columns
    INT4 = 2  # a scale and a minimum for each group
    BFLOAT16 = 3
    FLOAT16 = 4

    @property
    def label(self) -> str:
        """As it is written in logs and answers; the integer ones as --quantize calls them."""
        return {Format.INT4: "q4"}.get(self, self.name.lower())

    @property
    def grouped(self) -> bool:
        return self in (Format.INT8, Format.INT4)


# Formats that hold what GGUF tensor types hold; every other type goes into 8 bits, which is finer than it is.
_OF_KIND = {
    F32: Format.FLOAT32, F16: Format.FLOAT16, BF16: Format.BFLOAT16, Q8_0: Format.INT8, Q4_0: Format.INT4,
    Q4_1: Format.INT4, Q4_K: Format.INT4,
}
_FLOATS = {F16: Format.FLOAT16, BF16: Format.BFLOAT16}
AS_BLOCKS = (Q4_0, Q4_1, Q4_K, Q8_0)  # packed from their bytes, without rounding again


@dataclass(frozen=True)
class Precision:
    """One way to hold a model's matrices.

    Attributes:
        asked: the format of every matrix; None: each as its file has it.
        at_most: `asked` only narrows: what the file holds in as few bits stays as it is.
    """

    asked: Format | None
    at_most: bool = False

    def format_of(self, kind: int, head: bool = False, whole_groups: bool = True) -> Format:
        """The format of a matrix whose file has it in this GGUF tensor type (safetensors: F32, F16 or BF16).

        Args:
            head: it is the output head, which 4 bits would harm most (mean KL divergence 4e-2 instead of 3e-3).
            whole_groups: it is cut between groups; else their scales would not be those of the whole matrix, and it is
                held in floats.
        """
        found = self._format_of(kind, head)
        return found if whole_groups or not found.grouped else _FLOATS.get(kind, Format.FLOAT32)

    def _format_of(self, kind: int, head: bool) -> Format:
        own = _OF_KIND.get(kind, Format.INT8)
        if self.asked is None:
            return own
        if not self.at_most:
            return self.asked
        if own == Format.INT4 or (own == Format.INT8 and kind == Q8_0 and (head or self.asked == Format.INT8)):
            return own
        return Format.INT8 if head else self.asked

    @property
    def exact(self) -> bool:
        return self.asked == Format.FLOAT32


EXACT = Precision(Format.FLOAT32)
OWN = Precision(None)
BY_DTYPE = {"float32": EXACT, "bfloat16": Precision(Format.BFLOAT16), "float16": Precision(Format.FLOAT16)}
BY_QUANTIZE = {"int8": Precision(Format.INT8, True), "q4": Precision(Format.INT4, True)}


def precision_of(dtype: str | None, quantize: str | None) -> Precision:
    """What the two settings, of which one at most is given, ask for."""
    return BY_QUANTIZE[quantize] if quantize else BY_DTYPE[dtype] if dtype else OWN
