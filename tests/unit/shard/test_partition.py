"""Partitions cover a model once, whatever divides; and all parts together compute what the whole does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._common.errors import StartupError
from headrace_shard.parallel.partition import COLUMN_UNIT, Partition, Shape

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


def test_the_embedded_model_over_two_ranks_holds_equal_bytes() -> None:
    parts = [Partition.of(EMBEDDED, rank, 2) for rank in range(2)]
    assert [(len(p.heads), len(p.kv_heads), len(p.columns)) for p in parts] == [(6, 2, 672), (3, 1, 864)]
    assert all(p.columns.start % COLUMN_UNIT == 0 for p in parts)


def test_more_ranks_than_heads_are_refused_with_both_numbers() -> None:
    with pytest.raises(StartupError, match="--num-shard 10 is more than the model's 9 attention heads"):
        Partition.of(EMBEDDED, 0, 10)
