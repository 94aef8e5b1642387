"""The block manager against a plain model of who holds what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_shard.kv.blocks import NULL_BLOCK, BlockManager, blocks_for


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_every_block_is_free_or_held_by_one(blocks: int, actions: list[tuple[bool, int]]) -> None:
    manager = BlockManager(blocks)
    held: list[list[int]] = [[]]
    for allocates, number in actions:
        if allocates:
            taken = manager.allocate(number)
            assert (taken is None) == (number > manager.free + (number if taken is not None else 0))
            held.append(taken or [])
        else:
            manager.release(held.pop(number % len(held)))
            held = held or [[]]
        flat = [b for one in held for b in one]
        assert len(flat) == len(set(flat)) == blocks - manager.free
        assert NULL_BLOCK not in flat
        assert all(1 <= b <= blocks for b in flat)


def test_a_block_cannot_be_released_twice() -> None:
    manager = BlockManager(2)
    taken = manager.allocate(1)
    assert taken is not None
    manager.release(taken)
    with pytest.raises(ValueError, match=f"KV block {taken[0]} is not held"):
        manager.release(taken)


def test_blocks_for_counts_started_blocks() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
