"""Partitions cover a model once, whatever divides; and all parts together compute what the whole does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._common.errors import StartupError
from headrace_shard.parallel.partition import COLUMN_UNIT, Partition, Runs, Shape

EMBEDDED = Shape(hidden=576, intermediate=1536, vocab=49152, heads=9, kv_heads=3, head_dim=64)


@given(
    st.integers(1, 8), st.integers(1, 6), st.integers(1, 300), st.integers(1, 1000), st.data(),
)
def test_every_row_and_column_has_one_owner(kv: int, group: int, inner: int, vocab: int, data: st.DataObject) -> None:
    shape = Shape(64, inner, vocab, kv * group, kv, 16)
    world = data.draw(st.integers(1, min(shape.heads, inner, 8)))
    parts = [Partition.of(shape, rank, world) for rank in range(world)]
    assert [h for p in parts for h in p.heads] == list(range(shape.heads))
    assert [c for p in parts for c in p.columns] == list(range(inner))
    assert [v for p in parts for v in p.vocab][:vocab] == list(range(vocab))
    assert len({len(p.vocab) for p in parts}) == 1
    for p in parts:
        assert {h // group for h in p.heads} == set(p.kv_heads)
        assert len(p.heads) % len(p.kv_heads) == 0
        assert len(p.columns) > 0


def test_the_embedded_model_over_two_ranks_has_even_columns() -> None:
    parts = [Partition.of(EMBEDDED, rank, 2) for rank in range(2)]
    assert [(len(p.heads), len(p.kv_heads), len(p.columns)) for p in parts] == [(6, 2, 768), (3, 1, 768)]
    assert all(p.columns.start % COLUMN_UNIT == 0 for p in parts)


def test_two_and_three_ranks_of_the_embedded_model_hold_whole_runs() -> None:
    """Of a product's four runs each belongs to one rank, and the first two, and the last two, are summed before all."""
    heads = {n: [Partition.of(EMBEDDED, rank, n).head_runs for rank in range(n)] for n in (1, 2, 3, 4)}
    assert heads[1] == [Runs((192, 384, 384), (3,))]
    assert heads[2] == [Runs((192, 384, 384), (1, 2)), Runs((0, 0, 0), (1, 2))]
    assert heads[3] == [Runs((192, 192, 192), (1, 1, 2)), Runs((0, 192, 192), (1, 1, 2)), Runs((0, 0, 0), (1, 1, 2))]
    columns = {n: [Partition.of(EMBEDDED, rank, n).column_runs for rank in range(n)] for n in (1, 2, 3, 4)}
    assert columns[1] == [Runs((512, 768, 1024), (3,))]
    assert columns[2] == [Runs((512, 768, 768), (1, 2)), Runs((0, 0, 256), (1, 2))]
    assert columns[3] == [Runs((512, 512, 512), (1, 3, 2)), Runs((0, 256, 512), (1, 3, 2)), Runs((0, 0, 0), (1, 3, 2))]
    assert columns[4] == [Runs((0, 0, 0), (1, 1, 1, 1))] * 4


def test_where_cuts_fall_into_groups_a_product_is_one_run() -> None:
    shape = Shape(hidden=48, intermediate=128, vocab=300, heads=3, kv_heads=3, head_dim=16)
    assert Partition.of(shape, 0, 1).head_runs == Runs((0, 0, 0), (1,))
    assert Partition.of(Shape(64, 20, 300, 2, 2, 32), 0, 1).head_runs == Runs((32, 32, 32), (3,))


def test_more_ranks_than_heads_are_refused_with_both_numbers() -> None:
    with pytest.raises(StartupError, match="--num-shard 10 is more than the model's 9 attention heads"):
        Partition.of(EMBEDDED, 0, 10)
