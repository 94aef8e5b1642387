"""The block manager against a plain model of who holds what, and what free blocks still keep."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_shard.kv.blocks import NULL_BLOCK, BlockManager, blocks_for

BLOCKS = 12


class Blocks(RuleBasedStateMachine):
    """Holders take new blocks, share known ones, make theirs known, and let go; a plain dictionary keeps the score."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(BLOCKS)
        self.holders: list[list[int]] = []
        self.known: dict[bytes, int] = {}

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        free = self.manager.free
        taken = self.manager.allocate(count)
        assert (taken is None) == (count > free)
        if taken is not None:
            assert not {b for holder in self.holders for b in holder} & set(taken)
            self.known = {key: b for key, b in self.known.items() if b not in taken}
            self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(0, 9), name=st.binary(min_size=1, max_size=1))
    def label(self, number: int, name: bytes) -> None:
        for block in self.holders[number % len(self.holders)][:1]:
            self.manager.label(block, name, b"content of " + name)
            if name not in self.known and block not in self.known.values():
                self.known[name] = block

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(0, 9))
    def forget(self, number: int) -> None:
        holder = self.holders[number % len(self.holders)]
        self.manager.forget(holder)
        self.known = {key: b for key, b in self.known.items() if b not in holder}

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0, 9))
    def share(self, number: int) -> None:
        name = sorted(self.known)[number % len(self.known)]
        block = self.manager.find(name, b"content of " + name)
        assert block == self.known[name]
        self.manager.share(block)
        self.holders.append([block])

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(0, 9))
    def release(self, number: int) -> None:
        self.manager.release(self.holders.pop(number % len(self.holders)))

    @invariant()
    def blocks_are_conserved(self) -> None:
        held = {b for holder in self.holders for b in holder}
        assert len(held) == BLOCKS - self.manager.free
        assert all(self.manager.held(b) == (b in held) for b in range(1, BLOCKS + 1))
        assert NULL_BLOCK not in held
        assert self.manager.cached == len(self.known)
        for name, block in self.known.items():
            assert self.manager.find(name, b"content of " + name) == block
            assert self.manager.find(name, b"other content") is None


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_block_is_handed_out_first_and_one_without_a_key_before_it() -> None:
    manager = BlockManager(4)
    first, second, third, _plain = taken = manager.allocate(4) or []
    for block, key in zip(taken, (b"1", b"2", b"3"), strict=False):
        manager.label(block, key, b"")
    manager.release(taken[1:])  # a prefix from 2 on: its end goes first
    manager.release([first])
    assert manager.allocate(1) == [taken[3]]
    assert manager.allocate(3) == [third, second, first]
    assert manager.cached == 0


def test_a_block_cannot_be_released_twice() -> None:
    manager = BlockManager(2)
    taken = manager.allocate(1)
    assert taken is not None
    manager.release(taken)
    with pytest.raises(ValueError, match=f"KV block {taken[0]} is not held"):
        manager.release(taken)


def test_blocks_for_counts_started_blocks() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
