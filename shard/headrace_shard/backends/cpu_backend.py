"""A CPU through kernels of our own: weights in panels, fused operations, a KV cache laid out for its attention.

Matrices lie in float32, in 16 bits with the same sums, or in 8 or 4 bits with activations rounded by groups of 32. The KV
cache is float16, but float32 where all matrices are. What the kernels do not cover (heads that are no multiple of 16 wide)
is left to the torch twin, operation by operation. A row's result never depends on the rows beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace_shard.backends.base import AttentionShape, Part
from headrace_shard.backends.onednn_backend import MappedEmbedding
from headrace_shard.backends.torch_backend import LARGE_PAGES, TorchBackend
from headrace_shard.kernels import library as kernels
from headrace_shard.kernels.library import Library
from headrace_shard.kernels.recording import Call, Recording
from headrace_shard.kv.blocks import BLOCK_SIZE
from headrace_shard.kv.pages import PagesAhead
from headrace_shard.parallel.group import BOTH_HALVES, Group
from headrace_shard.parallel.partition import Runs
from headrace_shard.sampling.passes import Passes
from headrace_shard.step import StepInput
from headrace_shard.weights.dequantize import type_name
from headrace_shard.weights.precision import GROUP, Format, Precision
from headrace_shard.weights.source import Blocks, Dense, Table

MAX_HEAD_DIM = 512
MIN_ROOM = 32  # rows
PROMPT_TILES, LEAST_TILE = 4, 16  # a prompt's chunk has so many attention tiles, for all threads, or tiles of so many queries
INTEGERS = (Format.INT4, Format.INT8)


@dataclass(frozen=True)
class Packed:
    """One or more matrices over the same input. `address` is that of their array; `kept` is what it points to."""

    address: int
    count: int
    width: int  # of the output, all matrices together
    kept: tuple[object, ...]
    halves: bytes | None = None  # of a row-parallel layer, as `Group.sum` takes them
    planes: int = 1  # 2: the halves of this rank's product are kept apart


@dataclass(frozen=True)
class PackedNorm:
    """An RMS norm's structure and what it points to."""

    address: int
    kept: tuple[object, ...]


class CpuBackend(TorchBackend):
    """float32 activations on every operation's outside; `precision` says what is inside."""

    def __init__(self, group: Group, library: Library, threads: int, precision: Precision) -> None:
        super().__init__(torch.float32, torch.device("cpu"), group)
        library.set_threads(threads)
        self._library, self.precision = library, precision
        self._panels: list[torch.Tensor] = []
        self.passes: Passes = library
        self._code: Library | Recording = library  # where the operations' calls go
        self._layers: ctypes.Array[Call] | None = None
        self._in_integers = False  # whether some weights are
        self._prompts = 0  # how many of the step's last rows are those of prompts
        self._room = 0  # rows that buffers have
        self._heads: dict[AttentionShape, kernels.Heads] = {}
        self._tiles = kernels.Tiles()
        self._tile = self._prompt_tile = 0  # queries of an attention tile
        self._covers_attention = False
        self._angles = Angles()
        self._buffers: dict[str, torch.Tensor] = {}

    def pack_linear(  # type: ignore[override]
        self, parts: Sequence[Part], biases: Sequence[torch.Tensor] | None = None, runs: Runs | None = None
    ) -> Packed:
        halves = bytes(runs.halves) if runs else None
        apart = halves is not None and self._group.world_size > 1 and halves[self._group.rank] == BOTH_HALVES
        matrices, kept, width = (kernels.Matrix * len(parts))(), [], 0
        for number, given in enumerate(parts):
            part = Dense.of(given) if isinstance(given, torch.Tensor) else given
            panels = self._library.pack(part)
            self._in_integers |= kernels.format_of(part) in INTEGERS
            bias = biases[number].to(torch.float32, copy=True) if biases else None
            bias_address = bias.data_ptr() if bias is not None else None
            matrices[number] = kernels.Matrix(
                kernels.format_of(part), part.rows, part.columns, panels.data_ptr(), bias_address,
                runs.breaks if runs else (0, 0, 0), apart,
            )
            self._sizes.append((type_name(part.kind) if isinstance(part, Blocks) else part.format.label, len(panels)))
            self._panels.append(panels)
            kept.append(bias)
            width += part.rows
        return Packed(ctypes.addressof(matrices), len(parts), width, (matrices, *kept), halves, 1 + apart)

    @property
    def prompts_differ(self) -> bool:
        return self._in_integers and self._library.prompt_tile_rows > 0

    def read_rate(self, wait: Callable[[], object]) -> float:
        return self._library.read_rate(self._panels, wait)

    def pack_norm(self, weight: torch.Tensor, epsilon: float) -> PackedNorm:  # type: ignore[override]
        values = weight.to(torch.float32, copy=True)  # a mapped one would keep its file in memory
        norm = kernels.Norm(values.data_ptr(), epsilon)
        return PackedNorm(ctypes.addressof(norm), (norm, values))

    def pack_embedding(self, table: Table, ids: range) -> MappedEmbedding:  # type: ignore[override]
        return MappedEmbedding(table)

    def embed(self, table: MappedEmbedding) -> torch.Tensor:  # type: ignore[override]
        return table(self._ids)

    def kv_dtype(self, shape: AttentionShape) -> torch.dtype:
        exact = self.precision.exact or self.packed.keys() == {Format.FLOAT32.label}
        return torch.float32 if exact or not covers(shape) else torch.float16

    def allocate_kv(self, layers: int, blocks: int, shape: AttentionShape) -> None:
        self._covers_attention = covers(shape)
        if not self._covers_attention:
            super().allocate_kv(layers, blocks, shape)
            return
        # A block of all layers is in one piece, and so in the same large pages: a small one has no more than a head's block
        # of one layer, and takes as long to find as to read.
        size = (blocks + 1, layers, shape.kv_heads, 2 * BLOCK_SIZE * shape.head_dim)
        cache = self._zeros(size, self.kv_dtype(shape), LARGE_PAGES)
        self._cache, self._pages = list(cache.unbind(1)), PagesAhead(cache)
        self._heads.clear()
        self._layers = None
        shared = shape.heads // shape.kv_heads
        self._tile, self._prompt_tile = max(1, self._library.tile_rows // shared), 0
        if self._in_integers and self._cache[0].dtype == torch.float16 and shape.head_dim % GROUP == 0:
            self._prompt_tile = self._library.prompt_tile_rows // shared

    def begin(self, step: StepInput, inverse_frequencies: torch.Tensor) -> None:
        self._prompts = step.prompts
        if not self._covers_attention:
            super().begin(step, inverse_frequencies)
            return
        self._pages.reach(int(step.slots.max()) // BLOCK_SIZE)
        self._ids = torch.from_numpy(step.token_ids)
        self._wanted = torch.from_numpy(step.logit_rows)
        self._all_wanted = len(step.logit_rows) == len(step.token_ids)
        self._angles.cover(int(step.positions.max()) + 1, inverse_frequencies)
        tiles, self._kept = tiles_of(step, self._angles, self._tile, self._prompt_tile)
        ctypes.pointer(self._tiles)[0] = tiles  # in place: what was recorded has its address

    def run(self, layers: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Records the layers' calls and makes them in one: Python between them would cost a tenth of a one-row step."""
        if not self._covers_attention or not self._group.recordable(*x.shape):
            return layers(x)
        given, x = x, self._buffer("x", *x.shape)
        x.copy_(given)
        if self._layers is None:
            self._code = recording = Recording()
            layers(x)
            self._code, self._layers = self._library, recording.calls()
        recorded = self._layers
        self._group.run(lambda group: self._library.run(recorded, len(x), self._prompts, group))
        return x

    def norm_qkv(self, x: torch.Tensor, norm: PackedNorm, qkv: Packed) -> torch.Tensor:  # type: ignore[override]
        out = self._buffer("qkv", len(x), qkv.width) if self._covers_attention else None
        return self._linear(x, norm, qkv, out=out)

    def attention(self, qkv: torch.Tensor, layer: int, shape: AttentionShape) -> torch.Tensor:
        if not self._covers_attention:
            return super().attention(qkv, layer, shape)
        out = self._buffer("attended", len(qkv), shape.heads * shape.head_dim)
        cache = self._cache[layer]
        if shape not in self._heads:
            self._heads[shape] = kernels.Heads(
                shape.heads, shape.kv_heads, shape.head_dim, shape.window or 0, int(cache.dtype == torch.float16),
                cache.stride(0),
            )
        self._code.attention(
            qkv.data_ptr(), ctypes.addressof(self._heads[shape]), ctypes.addressof(self._tiles), cache.data_ptr(),
            out.data_ptr(),
        )
        return out

    def output(self, x: torch.Tensor, attended: torch.Tensor, projection: Packed) -> torch.Tensor:  # type: ignore[override]
        return self._added(x, projection, lambda residual, out: self._code.linear(
            attended.data_ptr(), len(x), self._prompts, None, projection.address, projection.count, residual, out
        ))

    def mlp(self, x: torch.Tensor, norm: PackedNorm, gate_up: Packed, down: Packed) -> torch.Tensor:  # type: ignore[override]
        return self._added(x, down, lambda residual, out: self._code.mlp(
            x.data_ptr(), len(x), self._prompts, norm.address, gate_up.address, down.address, residual, out
        ))

    def _added(self, x: torch.Tensor, last: Packed, compute: Callable[[int | None, int | None], None]) -> torch.Tensor:
        """x plus, summed over the ranks, what `compute(residual, out)` gives with the row-parallel weights `last`."""
        if self._group.world_size == 1:
            compute(x.data_ptr(), x.data_ptr())
            return x
        if isinstance(self._code, Recording):
            compute(None, None)
            halves = ctypes.cast(ctypes.c_char_p(last.halves), ctypes.c_void_p).value if last.halves else None
            self._code.sum(halves, x.data_ptr(), x.data_ptr(), last.width)
            return x
        part = self._group.room(last.planes * len(x), last.width)
        compute(None, part.data_ptr())
        return self._group.sum(part, x, last.halves)

    def head(self, x: torch.Tensor, norm: PackedNorm, head: Packed) -> torch.Tensor:  # type: ignore[override]
        rows = x if self._all_wanted else x[self._wanted]
        out = self._buffer("logits", len(rows), head.width)  # new memory would cost a page fault every thousand logits
        return self._group.gather(self._linear(rows, norm, head, out=out, prompts=0))

    def _linear(
        self, x: torch.Tensor, norm: PackedNorm | None, weights: Packed, residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None, prompts: int | None = None,
    ) -> torch.Tensor:
        """[residual +] weights x, written into `out` if given; `out` may be `residual`. `prompts`: None for the step's."""
        if out is None:
            out = torch.empty((len(x), weights.width))
        if len(x):
            self._code.linear(
                x.data_ptr(), len(x), self._prompts if prompts is None else prompts, norm.address if norm else None,
                weights.address, weights.count, residual.data_ptr() if residual is not None else None, out.data_ptr(),
            )
        return out

    def _buffer(self, name: str, rows: int, width: int) -> torch.Tensor:
        """Memory that is the same in every layer and every step; where more rows want it all are made anew."""
        if rows > self._room:
            self._room = max(MIN_ROOM, 1 << (rows - 1).bit_length())
            self._buffers.clear()
            self._layers = None
        if name not in self._buffers:
            self._buffers[name] = torch.empty((self._room, width))
        return self._buffers[name][:rows]


class Angles:
    """Cosines and sines [positions, head_dim / 2] of all positions up to the largest that was asked for."""

    def __init__(self) -> None:
        self.cosines = self.sines = np.zeros((0, 0), dtype=np.float32)

    def cover(self, positions: int, frequencies: torch.Tensor) -> None:
        if positions > len(self.cosines):
            count = max(512, 1 << (positions - 1).bit_length())
            angles = torch.arange(count)[:, None].float() * frequencies
            self.cosines, self.sines = angles.cos().numpy(), angles.sin().numpy()


def covers(shape: AttentionShape) -> bool:
    """Whether the kernels have attention for such heads."""
    return shape.head_dim % 16 == 0 and shape.head_dim <= MAX_HEAD_DIM


def tiles_of(
    step: StepInput, angles: Angles, tallest: int, tallest_of_prompts: int
) -> tuple[kernels.Tiles, tuple[object, ...]]:
    """The step's attention tiles, of at most so many queries, and what they point to; a 0 for prompts: they are as others."""
    decode, width = step.decode_tables.shape
    firsts, counts = [np.arange(decode, dtype=np.int32)], [np.ones(decode, dtype=np.int32)]
    starts, tables, at = [np.arange(decode, dtype=np.int64) * width], [step.decode_tables.reshape(-1)], decode * width
    first_prompt, prompts = len(step.token_ids) - step.prompts, 0
    for chunk in step.chunks:
        own = tallest_of_prompts > 0 and chunk.offset >= first_prompt
        most = min(tallest_of_prompts, max(LEAST_TILE, -(-chunk.length // PROMPT_TILES))) if own else tallest
        offsets = np.arange(0, chunk.length, most, dtype=np.int32)
        prompts += len(offsets) if own else 0
        firsts.append(offsets + np.int32(chunk.offset))
        counts.append(np.minimum(chunk.length - offsets, most, dtype=np.int32))
        starts.append(np.full(len(offsets), at, dtype=np.int64))
        tables.append(chunk.table)
        at += len(chunk.table)
    arrays = (
        np.concatenate(firsts), np.concatenate(counts), np.concatenate(starts),
        np.concatenate(tables).astype(np.int32, copy=False), np.ascontiguousarray(step.positions, dtype=np.int64),
        np.ascontiguousarray(step.slots, dtype=np.int64), angles.cosines, angles.sines,
    )
    tiles = kernels.Tiles(len(arrays[0]), prompts, len(step.token_ids), *(array.ctypes.data for array in arrays))
    return tiles, arrays
