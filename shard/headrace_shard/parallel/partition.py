"""Which slices of a Llama-shaped model each rank holds. Nothing has to divide: heads and columns are cut unevenly.

Attention is cut by KV groups (a KV head with its query heads); where there are fewer KV heads than ranks, a KV head is
copied to the ranks that share its query heads. Feed-forward columns are cut evenly even where the heads are not: ranks wait
for each other after either, so that less of the one makes no room for more of the other.
The vocabulary is padded to equal parts; the padding is never sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from headrace._common.errors import StartupError

COLUMN_UNIT = 32  # feed-forward columns are cut at multiples of this: the group size of quantized weights
EQUAL_RANKS = 3  # groups of up to so many ranks can agree in the last bit


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
class Runs:
    """In which order a row-parallel layer's products are summed, so that 1, 2 and 3 ranks agree in the last bit.

    The inputs lie in four runs, cut where two and where three ranks cut them. A product is the sum of two halves, each of
    two runs: a cut of two ranks lies between the halves, and of three ranks the middle one has a run of either half.

    Attributes:
        breaks: where the second, third and fourth run begin, among this rank's inputs.
        halves: of each rank, in which halves it has a part: 1 the first, 2 the second, 3 both.
    """

    breaks: tuple[int, int, int]
    halves: tuple[int, ...]

    @classmethod
    def of(cls, cuts: dict[int, list[int]], rank: int, world_size: int) -> Runs:
        """`cuts`: the edges of the ranks' inputs for each number of ranks that there can be up to EQUAL_RANKS, and for this."""
        edges = cuts[world_size]
        middle = cuts[2][1] if 2 in cuts else 0
        places = [cuts[3][1], middle, cuts[3][2]] if 3 in cuts else [middle] * 3
        if world_size > EQUAL_RANKS or places != sorted(places) or any(at % COLUMN_UNIT for at in places):
            return cls((0, 0, 0), (1,) * world_size)  # one run
        begin, end = edges[rank], edges[rank + 1]
        first, second, third = (min(max(at, begin), end) - begin for at in places)
        return cls((first, second, third), tuple((a < middle) + 2 * (b > middle) for a, b in pairwise(edges)))


@dataclass(frozen=True)
class Partition:
    """The part of one rank.

    Attributes:
        heads, kv_heads, columns: query heads, KV heads and feed-forward columns of this rank.
        vocab: its rows of the padded vocabulary; those at and beyond `Shape.vocab` do not exist.
        head_runs, column_runs: how products with the outputs of the heads, and with the columns, are summed.
    """

    rank: int
    world_size: int
    heads: range
    kv_heads: range
    columns: range
    vocab: range
    head_runs: Runs
    column_runs: Runs

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
        columns = _columns(shape, world_size)
        part = -(-shape.vocab // world_size)
        heads, kv_heads = attention[rank]
        head_cuts, column_cuts = {}, {}
        for ranks in {*range(1, 1 + min(EQUAL_RANKS, shape.heads, shape.intermediate)), world_size}:
            parts = _attention(shape, ranks)
            head_cuts[ranks] = [0, *(h.stop * shape.head_dim for h, _ in parts)]
            column_cuts[ranks] = [0, *(c.stop for c in _columns(shape, ranks))]
        return cls(
            rank, world_size, heads, kv_heads, columns[rank], range(rank * part, (rank + 1) * part),
            Runs.of(head_cuts, rank, world_size), Runs.of(column_cuts, rank, world_size),
        )


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


def _columns(shape: Shape, world_size: int) -> list[range]:
    """Feed-forward columns of each rank: whole units, as evenly as they go."""
    unit = COLUMN_UNIT if shape.intermediate >= world_size * COLUMN_UNIT else 1
    units = even(-(-shape.intermediate // unit), world_size)
    return [range(part.start * unit, min(part.stop * unit, shape.intermediate)) for part in units]


def even(count: int, parts: int) -> list[range]:
    """`count` things in `parts` consecutive ranges whose lengths differ by at most one, longer ones first."""
    size, more = divmod(count, parts)
    starts = [i * size + min(i, more) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
