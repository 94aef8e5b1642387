"""The compiled CPU kernels as Python sees them. Calls release the GIL; src/types.h declares the same structures."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from typing import Any, ClassVar

import numpy as np
import torch

from headrace_shard.kernels.build import BuildFailed, build
from headrace_shard.weights.source import Blocks

PANEL, GROUP = 16, 32
FLOAT32, INT8, INT4 = 0, 1, 2
Q4_0, Q4_1, Q8_0 = 2, 3, 8
FORMATS = {Q4_0: INT4, Q4_1: INT4, Q8_0: INT8}  # GGUF types that are packed without rounding anything again
GROUP_BYTES = {INT8: PANEL * GROUP + 2 * PANEL, INT4: PANEL * GROUP // 2 + 4 * PANEL}  # of a panel
Address = ctypes.c_void_p


class Matrix(ctypes.Structure):
    """A packed weight matrix [rows, columns]."""

    _fields_: ClassVar = [
        ("format", ctypes.c_int32), ("rows", ctypes.c_int32), ("columns", ctypes.c_int64), ("panels", Address),
        ("bias", Address), ("breaks", ctypes.c_int64 * 3), ("apart", ctypes.c_int32),
    ]


class Norm(ctypes.Structure):
    """An RMS norm."""

    _fields_: ClassVar = [("weight", Address), ("epsilon", ctypes.c_float)]


class Tiles(ctypes.Structure):
    """What the step's queries attend to."""

    _fields_: ClassVar = [
        ("count", ctypes.c_int32), ("tokens", ctypes.c_int32),
        *((name, Address) for name in ("firsts", "counts", "starts", "tables", "positions", "slots", "cosines", "sines")),
    ]


class Heads(ctypes.Structure):
    """Sizes of one attention layer. `window` 0: none. `half`: the cache holds float16, else float32."""

    _fields_: ClassVar = [(name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim", "window", "half")]


class Library:
    """The functions of the library. Addresses are those of contiguous float32 memory, unless said otherwise."""

    def __init__(self, variant: str = "") -> None:
        """Load the library, compiling it first if these sources have not been.

        Args:
            variant: the instruction set, "avx2" or "portable"; "" for the best that this CPU has. It holds for the process.

        Raises:
            BuildFailed: it is not there and cannot be built or loaded; one line.
        """
        code = load_code()
        code.headrace_use.restype = ctypes.c_char_p
        self.variant: str = code.headrace_use(variant.encode()).decode()
        self._code, self._arena = code, Arena()
        self.linear = _declare(code.headrace_linear, "x rows* norm parts count residual out")
        self.mlp = _declare(code.headrace_mlp, "x rows* norm gate_up down residual out")
        self.attention = _declare(code.headrace_attention, "qkv heads tiles cache out")
        self._pack = _declare(code.headrace_pack, "kind raw row_bytes* order rows* first_block* blocks* out", first_int=True)

    def set_threads(self, count: int) -> None:
        """Threads of the process that work on an operation, the caller's included."""
        self._code.headrace_threads(count)

    def pack_blocks(self, part: Blocks) -> torch.Tensor:
        """Panels of quantized rows."""
        size = GROUP_BYTES[FORMATS[part.kind]]
        out = self._arena.take(-(-part.rows // PANEL) * part.blocks * size)
        order = np.ascontiguousarray(part.order, dtype=np.int32)
        self._pack(
            part.kind, part.raw.ctypes.data, part.raw.strides[0], order.ctypes.data, part.rows, part.first_block,
            part.blocks, out.data_ptr(),
        )
        return out

    def pack_floats(self, weight: torch.Tensor) -> torch.Tensor:
        """Panels [panels, columns, 16] of rows in float32; the last panel is filled up with zeros."""
        rows, columns = weight.shape
        panels, whole = -(-rows // PANEL), rows // PANEL
        out = self._arena.take(panels * columns * PANEL * 4).view(torch.float32).view(panels, columns, PANEL)
        out[:whole] = weight[: whole * PANEL].reshape(whole, PANEL, columns).transpose(1, 2)
        if rows > whole * PANEL:
            out[whole, :, : rows - whole * PANEL] = weight[whole * PANEL :].T
        return out


def load_code() -> ctypes.CDLL:
    """The compiled library, built first if it has to be; raises BuildFailed."""
    try:
        return ctypes.CDLL(str(build()))
    except OSError as error:
        raise BuildFailed(f"cannot load the CPU kernels: {error}") from None


class Arena:
    """Memory for packed weights in huge pages: they are read from end to end, and each small page would stop the reading."""

    CHUNK = 32 << 20

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._lock = threading.Lock()

    def take(self, count: int) -> torch.Tensor:
        """`count` zero bytes, aligned to 64."""
        with self._lock:
            if self._used + count > len(self._chunk):
                memory = mmap.mmap(-1, max(count, self.CHUNK))
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    with contextlib.suppress(OSError):  # a kernel without them
                        memory.madvise(mmap.MADV_HUGEPAGE)
                chunk = torch.frombuffer(memory, dtype=torch.uint8)
                if count >= self.CHUNK:
                    return chunk
                self._chunk, self._used = chunk, 0
            at = self._used
            self._used = at + -(-count // 64) * 64
            return self._chunk[at : at + count]


def _declare(function: Any, arguments: str, first_int: bool = False) -> Any:
    """Set a function's argument types: addresses, 64-bit numbers where a name ends in *, `count` and a first int of 32."""
    types: list[Any] = [ctypes.c_int64 if name.endswith("*") else Address for name in arguments.split()]
    names = arguments.split()
    if first_int:
        types[0] = ctypes.c_int
    if "count" in names:
        types[names.index("count")] = ctypes.c_int
    function.argtypes, function.restype = types, None
    return function
