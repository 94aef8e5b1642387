"""The plain torch backend: the fallback for every device and the oracle of the others."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from headrace_shard.backends.base import AttentionShape, Part
from headrace_shard.kv.blocks import BLOCK_SIZE
from headrace_shard.parallel.group import Group
from headrace_shard.parallel.partition import Runs
from headrace_shard.sampling.passes import Passes, TorchPasses
from headrace_shard.step import Chunk, StepInput
from headrace_shard.weights.precision import EXACT, Precision
from headrace_shard.weights.source import Blocks, Dense, Table

SMALL_PAGES, LARGE_PAGES = mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE
Range = np.arange(BLOCK_SIZE, dtype=np.int64)


@dataclass(frozen=True)
class Linear:
    """weight [out, in], bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Embedding:
    """weight [ids, hidden] of the token ids that this rank answers for."""

    weight: torch.Tensor
    ids: range

    def __call__(self, places: torch.Tensor) -> torch.Tensor:
        """Rows of token ids, given as distances from the first."""
        return self.weight[places]


@dataclass(frozen=True)
class Norm:
    """RMS norm (Zhang and Sennrich 2019): x / rms(x) * weight, computed in float32."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(x.dtype) * self.weight


@dataclass(frozen=True)
class ChunkIndices:
    """A prompt chunk with the places of its whole context in the cache, and its causal mask [length, context]."""

    chunk: Chunk
    slots: torch.Tensor
    mask: torch.Tensor


class TorchBackend:
    """Paged attention by gather and batched matrix products; K and V lie as [kv heads, slots, head_dim] a layer."""

    passes: Passes = TorchPasses()
    precision: Precision = EXACT  # values, which it takes to its own data type

    def __init__(self, dtype: torch.dtype, device: torch.device, group: Group) -> None:
        self.dtype, self.device, self._group = dtype, device, group
        self._sizes: list[tuple[str, int]] = []  # format and bytes of each matrix; layers are packed on several threads
        self._k: list[torch.Tensor] = []
        self._v: list[torch.Tensor] = []

    def pack_linear(
        self, parts: Sequence[Part], biases: Sequence[torch.Tensor] | None = None, runs: Runs | None = None
    ) -> Linear:
        weights = [self._move(values_of(part)) for part in parts]
        self._sizes += [(str(self.dtype).removeprefix("torch."), weight.nbytes) for weight in weights]
        bias = self._move(torch.cat(list(biases))) if biases else None
        return Linear(torch.cat(weights) if len(weights) > 1 else weights[0], bias)

    def pack_norm(self, weight: torch.Tensor, epsilon: float) -> Norm:
        return Norm(self._move(weight), epsilon)

    def pack_embedding(self, table: Table, ids: range) -> Embedding:
        return Embedding(self._move(table.take(np.arange(ids.start, ids.stop))), ids)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype)

    @property
    def packed(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for name, size in self._sizes:
            counts[name] += size
        return counts

    @property
    def prompts_differ(self) -> bool:
        return False

    def read_rate(self, wait: Callable[[], object]) -> float:
        return 0.0

    def kv_dtype(self, shape: AttentionShape) -> torch.dtype:
        return self.dtype

    def allocate_kv(self, layers: int, blocks: int, shape: AttentionShape) -> None:
        size = (shape.kv_heads, (blocks + 1) * BLOCK_SIZE, shape.head_dim)
        self._k = [self._zeros(size, self.dtype) for _ in range(layers)]
        self._v = [self._zeros(size, self.dtype) for _ in range(layers)]

    def _zeros(self, size: tuple[int, ...], dtype: torch.dtype, advice: int = SMALL_PAGES) -> torch.Tensor:
        """Zeros; on a CPU as pages that the system hands out when they are first written.

        Small ones unless `advice` is another: else every head of every layer would take 2 MB with its first token.
        """
        if self.device.type != "cpu":
            return torch.zeros(size, dtype=dtype, device=self.device)
        count = math.prod(size) * dtype.itemsize
        try:
            memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{count} bytes for the KV cache: {error.strerror}") from None
        with contextlib.suppress(OSError):  # a kernel that has no others
            memory.madvise(advice)
        return torch.frombuffer(memory, dtype=dtype).view(size)

    def begin(self, step: StepInput, inverse_frequencies: torch.Tensor) -> None:
        positions = torch.from_numpy(step.positions).to(self.device)
        angles = positions[:, None].float() * inverse_frequencies
        self._cos = angles.cos().to(self.dtype)[:, None]  # [tokens, 1, head_dim / 2]
        self._sin = angles.sin().to(self.dtype)[:, None]
        self._ids = torch.from_numpy(step.token_ids).to(self.device)
        self._slots = torch.from_numpy(step.slots).to(self.device)
        self._wanted = torch.from_numpy(step.logit_rows).to(self.device)
        self._all_wanted = len(step.logit_rows) == len(step.token_ids)
        self._decode = len(step.decode_lengths)
        if self._decode:
            places = (step.decode_tables.astype(np.int64)[:, :, None] * BLOCK_SIZE + Range).reshape(self._decode, -1)
            longest = int(step.decode_lengths.max())
            self._decode_slots = torch.from_numpy(places[:, :longest].reshape(-1)).to(self.device)
            self._decode_ages = self._ages(step.decode_lengths[:, None] - 1, np.arange(longest)[None])
        self._chunks = []
        for chunk in step.chunks:
            context = chunk.start + chunk.length
            places = (chunk.table.astype(np.int64)[:, None] * BLOCK_SIZE + Range).reshape(-1)[:context]
            ages = self._ages(np.arange(chunk.start, context)[:, None], np.arange(context)[None])
            self._chunks.append(ChunkIndices(chunk, torch.from_numpy(places).to(self.device), ages))
        self._masks: dict[int | None, list[torch.Tensor]] = {}

    def _ages(self, queries: np.ndarray, keys: np.ndarray) -> torch.Tensor:
        """How many tokens before each query each key lies; negative: after it."""
        return torch.from_numpy(queries - keys).to(self.device)

    def _masks_for(self, window: int | None) -> list[torch.Tensor]:
        """Additive masks of the decode rows (if any), then of each chunk: 0 where a query may look, else -inf."""
        if window not in self._masks:
            ages = ([self._decode_ages] if self._decode else []) + [c.mask for c in self._chunks]
            hidden = [(a < 0) if window is None else (a < 0) | (a >= window) for a in ages]
            self._masks[window] = [torch.zeros_like(h, dtype=torch.float32).masked_fill_(h, -torch.inf) for h in hidden]
        return self._masks[window]

    def embed(self, table: Embedding) -> torch.Tensor:
        if self._group.world_size == 1:
            return table(self._ids)
        places, count = self._ids - table.ids.start, len(table.ids)
        rows = table(places.clamp(0, count - 1))
        here = (places >= 0) & (places < count)
        return self._group.sum(torch.where(here[:, None], rows, 0))

    def run(self, layers: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return layers(x)

    def norm_qkv(self, x: torch.Tensor, norm: Norm, qkv: Linear) -> torch.Tensor:
        return qkv(norm(x))

    def attention(self, qkv: torch.Tensor, layer: int, shape: AttentionShape) -> torch.Tensor:
        rows = qkv.view(len(qkv), -1, shape.head_dim)
        rotated = self._rotate(rows[:, : shape.heads + shape.kv_heads])
        q, k, v = rotated[:, : shape.heads], rotated[:, shape.heads :], rows[:, shape.heads + shape.kv_heads :]
        k_cache, v_cache = self._k[layer], self._v[layer]
        k_cache.index_copy_(1, self._slots, k.transpose(0, 1))
        v_cache.index_copy_(1, self._slots, v.transpose(0, 1))
        masks = self._masks_for(shape.window)
        parts = []
        if self._decode:
            parts.append(self._attend_decode(q[: self._decode], k_cache, v_cache, masks[0], shape))
        for one, mask in zip(self._chunks, masks[1 if self._decode else 0 :], strict=True):
            at = one.chunk.offset
            parts.append(self._attend_chunk(q[at : at + one.chunk.length], k_cache, v_cache, one.slots, mask, shape))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding (Su et al. 2021) in the half-split layout of `transformers`; x [tokens, heads, head_dim]."""
        first, second = x.chunk(2, dim=-1)
        cos, sin = self._cos, self._sin
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _attend_decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, mask: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        """q [rows, heads, head_dim], one query a sequence: [rows, heads head_dim]."""
        rows, kv, dim = len(q), shape.kv_heads, shape.head_dim
        k = k_cache.index_select(1, self._decode_slots).view(kv * rows, -1, dim)
        v = v_cache.index_select(1, self._decode_slots).view(kv * rows, -1, dim)
        queries = q.reshape(rows, kv, -1, dim).transpose(0, 1).reshape(kv * rows, -1, dim) * dim**-0.5
        scores = torch.bmm(queries, k.transpose(1, 2)).float().view(kv, rows, -1, k.shape[1])
        weights = (scores + mask[None, :, None]).softmax(-1).to(q.dtype).view(kv * rows, -1, k.shape[1])
        return torch.bmm(weights, v).view(kv, rows, -1).transpose(0, 1).reshape(rows, -1)

    def _attend_chunk(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """q [length, heads, head_dim], consecutive queries of one sequence: [length, heads head_dim]."""
        length, kv, dim = len(q), shape.kv_heads, shape.head_dim
        k, v = k_cache.index_select(1, slots), v_cache.index_select(1, slots)
        queries = q.reshape(length, kv, -1, dim).permute(1, 2, 0, 3).reshape(kv, -1, dim) * dim**-0.5
        scores = torch.bmm(queries, k.transpose(1, 2)).float().view(kv, -1, length, k.shape[1])
        weights = (scores + mask).softmax(-1).to(q.dtype).view(kv, -1, k.shape[1])
        return torch.bmm(weights, v).view(kv, -1, length, dim).permute(2, 0, 1, 3).reshape(length, -1)

    def output(self, x: torch.Tensor, attended: torch.Tensor, projection: Linear) -> torch.Tensor:
        return x + self._group.sum(projection(attended))

    def mlp(self, x: torch.Tensor, norm: Norm, gate_up: Linear, down: Linear) -> torch.Tensor:
        gate, up = gate_up(norm(x)).chunk(2, dim=-1)
        return x + self._group.sum(down(F.silu(gate) * up))

    def head(self, x: torch.Tensor, norm: Norm, head: Linear) -> torch.Tensor:
        rows = x if self._all_wanted else x[self._wanted]
        return self._group.gather(head(norm(rows)).float())


def values_of(part: Part) -> torch.Tensor:
    """A matrix's values, [out, in]."""
    assert not isinstance(part, Blocks), "blocks are for backends whose precision asks for them"
    return part.whole() if isinstance(part, Dense) else part
