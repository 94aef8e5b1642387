"""The pool of KV blocks: who holds which, by reference counts, and what the free ones still hold.

A free block keeps its content, under a key, until it is handed out again: that is the prefix cache (`kv.prefix`). The
free list is in the order in which blocks are to be handed out: first those without a key, then the least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

BLOCK_SIZE = 16  # tokens in a block
NULL_BLOCK = 0  # never handed out: padding in block tables points to it


class BlockManager:
    """Hands out block numbers 1..blocks. Every operation costs O(1) for each block. Knows nothing of memory."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = OrderedDict.fromkeys(range(1, blocks + 1))
        self._references = [0] * (blocks + 1)
        self._cached: dict[bytes, int] = {}
        self._labels: list[tuple[bytes, bytes] | None] = [None] * (blocks + 1)  # key and content

    @property
    def free(self) -> int:
        """Blocks that nobody holds, whatever they still keep."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that can be found by their key, held or not."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            label = self._labels[block]
            if label is not None:
                del self._cached[label[0]]
                self._labels[block] = None
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block. Of the blocks that this frees the last is handed out again first.

        Raises:
            ValueError: a block is not held by anyone.
        """
        for block in reversed(blocks):
            if block == NULL_BLOCK or not self._references[block]:
                raise ValueError(f"KV block {block} is not held")
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=self._labels[block] is not None)

    def find(self, key: bytes, content: bytes) -> int | None:
        """The block that holds this content under this key."""
        block = self._cached.get(key)
        return block if block is not None and self._labels[block] == (key, content) else None

    def held(self, block: int) -> bool:
        return self._references[block] > 0

    def share(self, block: int) -> None:
        """Take one more reference to a block that was found."""
        if not self._references[block]:
            del self._free[block]
        self._references[block] += 1

    def label(self, block: int, key: bytes, content: bytes) -> None:
        """Make a held block known under a key; if another block is, that one stays."""
        if key not in self._cached and self._labels[block] is None:
            self._cached[key] = block
            self._labels[block] = (key, content)

    def forget(self, blocks: Iterable[int]) -> None:
        """Take the keys of held blocks away: what they hold is not to be used again."""
        for block in blocks:
            label = self._labels[block]
            if label is not None:
                del self._cached[label[0]]
                self._labels[block] = None


def blocks_for(tokens: int) -> int:
    """Blocks that so many tokens fill."""
    return -(-tokens // BLOCK_SIZE)
