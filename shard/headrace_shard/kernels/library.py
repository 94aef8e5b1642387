"""The compiled CPU kernels as Python sees them. Calls release the GIL; src/types.h declares the same structures."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from headrace_shard.kernels.build import BuildFailed, build
from headrace_shard.kernels.recording import Call
from headrace_shard.weights.precision import GROUP, OWN, Format
from headrace_shard.weights.source import Blocks, Dense

PANEL = 16
# Bytes of a panel for each group of columns.
GROUP_BYTES = {
    Format.FLOAT32: 4 * PANEL * GROUP, Format.BFLOAT16: 2 * PANEL * GROUP, Format.FLOAT16: 2 * PANEL * GROUP,
    Format.INT8: PANEL * GROUP + 2 * PANEL, Format.INT4: PANEL * GROUP // 2 + 4 * PANEL,
}
PIECE_ROWS = 1024  # that are dequantized at once
SPAN, MOST_SPANS = 1 << 17, 2048  # bytes that a thread reads at once, and how often: 256 MB are enough
FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16, torch.float16: Format.FLOAT16}
Address = ctypes.c_void_p
_INTS = ("count", "kind", "format")


class Matrix(ctypes.Structure):
    """A packed weight matrix [rows, columns]."""

    _fields_: ClassVar = [
        ("format", ctypes.c_int32), ("rows", ctypes.c_int32), ("columns", ctypes.c_int64), ("panels", Address),
        ("bias", Address), ("breaks", ctypes.c_int64 * 3), ("apart", ctypes.c_int32),
    ]


class Values(ctypes.Structure):
    """Rows of a matrix in 32 or 16 bits."""

    _fields_: ClassVar = [
        ("format", ctypes.c_int32), ("rows", ctypes.c_int64), ("columns", ctypes.c_int64), ("row_bytes", ctypes.c_int64),
        ("data", Address),
    ]


class Norm(ctypes.Structure):
    """An RMS norm."""

    _fields_: ClassVar = [("weight", Address), ("epsilon", ctypes.c_float)]


class Tiles(ctypes.Structure):
    """What the step's queries attend to."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("count", "prompts", "tokens")),
        *((name, Address) for name in ("firsts", "counts", "starts", "tables", "positions", "slots", "cosines", "sines")),
    ]


class Heads(ctypes.Structure):
    """Sizes of one attention layer. `window` 0: none. `half`: the cache holds float16, else float32. `block_stride`: numbers
    from one block of its cache to the next.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim", "window", "half")),
        ("block_stride", ctypes.c_int64),
    ]


class Library:
    """The functions of the library. Addresses are those of contiguous float32 memory, unless said otherwise."""

    def __init__(self, variant: str = "") -> None:
        """Load the library, compiling it first if these sources have not been.

        Args:
            variant: the instruction set, "amx", "avx512", "avx2" or "portable"; "" for the best that this CPU has. It holds
                for the process. Where the CPU does not have it, the next one that it has is taken.

        Raises:
            ValueError: there is no such variant.
            BuildFailed: it is not there and cannot be built or loaded; one line.
        """
        code = load_code()
        code.headrace_use.restype = ctypes.c_char_p
        self.variant: str = code.headrace_use(variant.encode()).decode()
        if not self.variant:
            raise ValueError(f"no kernels are called {variant!r}")
        # Pairs of a query and a head that share what attention reads of the cache.
        self.tile_rows: int = code.headrace_tile_rows()
        # The same in tiles of prompts, whose rows are computed in numbers of their own; 0: all rows are alike.
        self.prompt_tile_rows: int = code.headrace_prompt_tile_rows()
        self._code, self._arena = code, Arena()
        self.linear = _declare(code.headrace_linear, "x rows* prompts* norm parts count residual out")
        self.mlp = _declare(code.headrace_mlp, "x rows* prompts* norm gate_up down residual out")
        self.attention = _declare(code.headrace_attention, "qkv heads tiles cache out")
        self._scan = _declare(code.headrace_scan, "logits rows* stride* columns* best log_sums")
        self._draw = _declare(code.headrace_draw, "logits rows* stride* columns* temperatures numbers tokens")
        self._mask = _declare(code.headrace_mask, "logits places count* stride* columns* bits words*")
        self._threshold = _declare(code.headrace_threshold, "scores weights rows* columns* masses thresholds")
        self._run = _declare(code.headrace_run, "calls length* rows* prompts* group", ctypes.c_uint32)
        self._pack = _declare(code.headrace_pack, "values format out")
        self._pack_blocks = _declare(
            code.headrace_pack_blocks, "kind raw row_bytes* order rows* first_group* groups* out"
        )
        self._evict, self._read = (
            _declare(function, "addresses bytes count") for function in (code.headrace_evict, code.headrace_read)
        )

    def set_threads(self, count: int) -> None:
        """Threads of the process that work on an operation, the caller's included."""
        self._code.headrace_threads(count)

    def run(self, calls: ctypes.Array[Call], rows: int, prompts: int, group: int | None = None) -> int:
        """Make recorded calls, each with so many rows, of which the last `prompts` belong to prompts.

        `group`: whose sums they are. Returns 0, or what has broken it.
        """
        return int(self._run(ctypes.addressof(calls), len(calls), rows, prompts, group))

    def scan(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row of logits [rows, vocab] the first largest one's place, and the log of the sum of exp."""
        best, log_sums = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        self._scan(*_matrix(logits), best.data_ptr(), log_sums.data_ptr())
        return best, log_sums

    def draw(self, logits: torch.Tensor, temperatures: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The token of each row [rows] at which softmax(logits / temperature) in sum passes the row's number.

        logits [rows, vocab] and temperatures [rows] are float32, numbers [rows] float64 from [0, 1).
        """
        tokens = torch.empty(len(logits), dtype=torch.int64)
        temperatures, numbers = temperatures.contiguous(), numbers.contiguous()
        self._draw(*_matrix(logits), temperatures.data_ptr(), numbers.data_ptr(), tokens.data_ptr())
        return tokens

    def mask(self, logits: torch.Tensor, places: Sequence[int], bits: npt.NDArray[np.uint32]) -> None:
        """Make -inf what has no bit, in the rows of logits [rows, vocab] at `places`; bits [places, words]."""
        at, bits = np.array(places, dtype=np.int64), np.ascontiguousarray(bits)
        data, _, stride, columns = _matrix(logits)
        self._mask(data, at.ctypes.data, len(at), stride, columns, bits.ctypes.data, bits.shape[1])

    def threshold(self, scores: torch.Tensor, weights: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
        """[rows] the largest t at which the weights of scores >= t, [rows, n] both, are at least the mass, or all there is."""
        scores, weights, masses = scores.contiguous(), weights.contiguous(), masses.double().contiguous()
        out = torch.empty(len(scores))
        self._threshold(scores.data_ptr(), weights.data_ptr(), *scores.shape, masses.data_ptr(), out.data_ptr())
        return out

    def pack(self, part: Blocks | Dense) -> torch.Tensor:
        """Panels of a matrix, in its format; the last panel is filled up with zeros."""
        format_ = format_of(part)
        out = self._arena.take(-(-part.rows // PANEL) * panel_bytes(format_, part.columns))
        if isinstance(part, Dense):
            self._pack_values(part, out)
            return out
        order = np.ascontiguousarray(part.order, dtype=np.int32)
        self._pack_blocks(
            part.kind, part.raw.ctypes.data, part.raw.strides[0], order.ctypes.data, part.rows, part.first_group,
            part.groups, out.data_ptr(),
        )
        return out

    def _pack_values(self, part: Dense, out: torch.Tensor) -> None:
        size = panel_bytes(part.format, part.columns)
        for first in range(0, part.stored, PIECE_ROWS):
            piece = part.read(range(first, min(part.stored, first + PIECE_ROWS)))
            if piece.dtype not in FORMATS:
                piece = piece.float()
            if piece.stride(1) != 1:
                piece = piece.contiguous()
            values = Values(FORMATS[piece.dtype], *piece.shape, piece.stride(0) * piece.itemsize, piece.data_ptr())
            self._pack(ctypes.addressof(values), part.format, out.data_ptr() + first // PANEL * size)

    def read_rate(self, packed: Sequence[torch.Tensor], wait: Callable[[], object]) -> float:
        """Bytes per second at which all threads read these from memory, once, between two calls of `wait`.

        They are taken out of the cache before, so that it is the memory's own rate however small they are.
        """
        spans = [
            (part.data_ptr() + at, min(SPAN, len(part) - at)) for part in packed for at in range(0, len(part), SPAN)
        ][:MOST_SPANS]
        addresses = np.array([span[0] for span in spans], dtype=np.uint64)
        sizes = np.array([span[1] for span in spans], dtype=np.int64)
        given = addresses.ctypes.data, sizes.ctypes.data, len(spans)
        self._evict(*given)
        wait()
        begin = time.perf_counter()
        self._read(*given)
        wait()
        return float(sizes.sum()) / (time.perf_counter() - begin)


def format_of(part: Blocks | Dense) -> Format:
    """The format that it is packed in."""
    return part.format if isinstance(part, Dense) else OWN.format_of(part.kind)


def panel_bytes(format_: Format, columns: int) -> int:
    """Bytes of one panel."""
    return columns * GROUP_BYTES[format_] // GROUP


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
                # Shared memory, which is mmap's default, would get small pages where the system says so for shared memory.
                memory = mmap.mmap(-1, max(count, self.CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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


def _matrix(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, rows, numbers from a row to the next, and columns."""
    assert x.stride(1) == 1
    return x.data_ptr(), x.shape[0], x.stride(0), x.shape[1]


def _declare(function: Any, arguments: str, result: Any = None) -> Any:
    """Set a function's types. Arguments are addresses, 64-bit numbers where a name ends in *, 32-bit ones named in `_INTS`."""
    function.argtypes = [
        ctypes.c_int64 if name.endswith("*") else ctypes.c_int if name in _INTS else Address for name in arguments.split()
    ]
    function.restype = result
    return function
