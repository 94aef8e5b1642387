"""Which slices of a Llama-shaped model each rank holds. Nothing has to divide: heads and columns are cut unevenly.

Attention is cut by KV groups (a KV head with its query heads); where there are fewer KV heads than ranks, a KV head is
copied to the ranks that share its query heads. The feed-forward part is cut so that all ranks hold equally many bytes.
The vocabulary is padded to equal parts; the padding is never sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from headrace._common.errors import StartupError

COLUMN_UNIT = 32  # feed-forward columns are cut at multiples of this: the group size of quantized weights


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that a partition depends on."""

    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Partition:
    """The part of one rank.

    Attributes:
        heads, kv_heads, columns: query heads, KV heads and feed-forward columns of this rank.
        vocab: its rows of the padded vocabulary; those at and beyond `Shape.vocab` do not exist.
    """

    rank: int
    world_size: int
    heads: range
    kv_heads: range
    columns: range
    vocab: range

    @classmethod
    def of(cls, shape: Shape, rank: int, world_size: int) -> Partition:
        """Cut the model for one rank of a group.

        Raises:
            StartupError: there are more ranks than query heads or feed-forward columns; names both numbers.
        """
        if world_size > shape.heads:
            raise StartupError(f"--num-shard {world_size} is more than the model's {shape.heads} attention heads")
        if world_size > shape.intermediate:
            raise StartupError(f"--num-shard {world_size} is more than the model's {shape.intermediate} feed-forward columns")
        attention = _attention(shape, world_size)
        columns = _columns(shape, attention)
        part = -(-shape.vocab // world_size)
        heads, kv_heads = attention[rank]
        return cls(rank, world_size, heads, kv_heads, columns[rank], range(rank * part, (rank + 1) * part))


def _attention(shape: Shape, world_size: int) -> list[tuple[range, range]]:
    """(query heads, KV heads) of each rank."""
    group = shape.heads // shape.kv_heads
    if world_size <= shape.kv_heads:
        return [
            (range(kv.start * group, kv.stop * group), kv) for kv in even(shape.kv_heads, world_size)
        ]
    rows = []
    for number, ranks in enumerate(len(r) for r in even(world_size, shape.kv_heads)):
        first = number * group
        rows += [
            (range(first + part.start, first + part.stop), range(number, number + 1)) for part in even(group, ranks)
        ]
    return rows


def _columns(shape: Shape, attention: list[tuple[range, range]]) -> list[range]:
    """Feed-forward columns of each rank: whole units, so many that attention and feed-forward weights together are even."""
    world_size = len(attention)
    unit = COLUMN_UNIT if shape.intermediate >= world_size * COLUMN_UNIT else 1
    units = -(-shape.intermediate // unit)
    # In weights per hidden unit: q and o have head_dim rows a head, k and v a KV head; gate, up and down one a column.
    weights = [shape.head_dim * 2 * (len(heads) + len(kv)) for heads, kv in attention]
    fair = (sum(weights) + 3 * shape.intermediate) / world_size
    wanted = [max(1.0, (fair - w) / (3 * unit)) for w in weights]
    scale = units / sum(wanted)
    edges, at = [0], 0.0
    for rank, want in enumerate(wanted):
        at += want * scale
        left = world_size - rank - 1
        edges.append(min(max(round(at), edges[-1] + 1), units - left))
    return [range(a * unit, min(b * unit, shape.intermediate)) for a, b in pairwise(edges)]


def even(count: int, parts: int) -> list[range]:
    """`count` things in `parts` consecutive ranges whose lengths differ by at most one, longer ones first."""
    size, more = divmod(count, parts)
    starts = [i * size + min(i, more) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
