"""The pool of KV blocks: who holds which, by reference counts, with an O(1) free list."""

from __future__ import annotations

from collections.abc import Iterable

BLOCK_SIZE = 16  # tokens in a block
NULL_BLOCK = 0  # never handed out: padding in block tables points to it


class BlockManager:
    """Hands out block numbers 1..blocks. Knows nothing of tokens or memory."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks, 0, -1))
        self._references = [0] * (blocks + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block.

        Raises:
            ValueError: a block is not held by anyone.
        """
        for block in blocks:
            if block == NULL_BLOCK or not self._references[block]:
                raise ValueError(f"KV block {block} is not held")
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)


def blocks_for(tokens: int) -> int:
    """Blocks that so many tokens fill."""
    return -(-tokens // BLOCK_SIZE)
