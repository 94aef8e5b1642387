"""Random numbers depend on seed and index alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace_shard.sampling.random import uniform

SEEDS = st.integers(0, 2**64 - 1)


@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**31)), min_size=1, max_size=8))
def test_a_number_does_not_depend_on_its_neighbours(rows: list[tuple[int, int]]) -> None:
    seeds, indices = np.array([r[0] for r in rows], dtype=np.uint64), np.array([r[1] for r in rows], dtype=np.int64)
    together = uniform(seeds, indices)
    alone = [uniform(seeds[i : i + 1], indices[i : i + 1])[0] for i in range(len(rows))]
    assert together.tolist() == alone
    assert all(0 <= x < 1 for x in alone)


def test_numbers_are_spread_evenly_over_seeds_and_indices() -> None:
    for seeds, indices in ((np.arange(20000), np.zeros(20000)), (np.zeros(20000), np.arange(20000))):
        x = uniform(seeds.astype(np.uint64), indices.astype(np.int64))
        counts = np.histogram(x, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square, 19 degrees of freedom: 0.07 %
        assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.03
