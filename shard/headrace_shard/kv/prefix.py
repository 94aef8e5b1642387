"""The prefix cache: full blocks of tokens, prompt and output alike, are found again by a chain of hashes.

The key of a block is the hash of the previous block's key and its own tokens, so that it stands for everything up to
its end; the first one's previous key is the request's cache salt. Requests share blocks while they run; a block that
nobody holds any more stays until its place is needed. A request that was preempted finds its own blocks again.

Where prompts and generated tokens are computed differently, K and V of a token say which of them it was. There the block
in which the generated ones begin has that place in its key, and so in those of all behind it: they are found by a request
of which these very tokens are generated, and not by one of whose prompt they are a part.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from headrace_shard.batch import RunningBatch
from headrace_shard.kv.blocks import BLOCK_SIZE, BlockManager, blocks_for
from headrace_shard.requests import Request

KEY_BYTES = 16


def chain(previous: bytes, content: bytes) -> bytes:
    """The key of a block with this content behind a block of that key."""
    return blake2b(previous + content, digest_size=KEY_BYTES).digest()


class PrefixCache:
    """Gives rows the blocks that others have computed, and makes theirs known.

    Attributes:
        asked, hits: prompt tokens of all requests so far, and how many of them needed no forward pass.
    """

    def __init__(
        self, rows: RunningBatch, blocks: BlockManager, enabled: bool = True, prompts_differ: bool = False
    ) -> None:
        """`prompts_differ`: prompts are computed differently from generated tokens."""
        self._rows, self._blocks, self._enabled, self._prompts_differ = rows, blocks, enabled, prompts_differ
        self.asked = self.hits = 0

    def extend(self, slot: int) -> bytes | None:
        """Take the cached blocks that follow what the row has computed.

        The last token is left out, since it must be computed for its logits. Nothing is taken for a request that wants
        the log probabilities of its prompt.

        Returns:
            The key of the block that the row is to compute next, or None if it starts within a block.
        """
        rows = self._rows
        at, rest = divmod(int(rows.computed[slot]), BLOCK_SIZE)
        request = rows.request(slot)
        if not self._enabled or rest or at < int(rows.held[slot]) or request.prompt_logprobs:
            return None
        last = (int(rows.known[slot]) - 1) // BLOCK_SIZE
        found = []
        for number in range(at, last):
            block = self._blocks.find(self.key(slot, number), self._content(slot, number))
            if block is None:
                break
            self._blocks.share(block)
            found.append(block)
        if found:
            rows.hold(slot, found)
            rows.computed[slot] += len(found) * BLOCK_SIZE
            rows.stored[slot] = at + len(found)
            rows.cached[slot] += len(found) * BLOCK_SIZE
            self.hits += len(found) * BLOCK_SIZE
        return self.key(slot, at + len(found)) if at + len(found) < last else None

    def store(self, slot: int) -> None:
        """Make the blocks known that have become full."""
        if not self._enabled:
            return
        rows = self._rows
        for number in range(int(rows.stored[slot]), int(rows.computed[slot]) // BLOCK_SIZE):
            self._blocks.label(int(rows.table[slot, number]), self.key(slot, number), self._content(slot, number))
        rows.stored[slot] = rows.computed[slot] // BLOCK_SIZE

    def forget(self, slot: int) -> None:
        """Have nobody find the row's blocks: what is in them has proved bad."""
        self._blocks.forget(self._rows.blocks(slot))

    def key(self, slot: int, number: int) -> bytes:
        """The key of a row's block; the row knows all of its tokens."""
        request = self._rows.request(slot)
        keys = request.block_keys
        while len(keys) <= number:
            previous = keys[-1] if keys else request.cache_salt.encode()
            keys.append(chain(previous, self._content(slot, len(keys))))
        return keys[number]

    def keys(self, slot: int, start: int, end: int) -> list[bytes]:
        """Keys of the blocks that a row touches when it computes the tokens from `start` to `end`, as far as all of
        their tokens are known."""
        if not self._enabled:
            return []
        last = min(blocks_for(end), int(self._rows.known[slot]) // BLOCK_SIZE)
        return [self.key(slot, number) for number in range(start // BLOCK_SIZE, last)]

    def shared(self, request: Request) -> int:
        """How many blocks of a request that waits are held by requests that run: they take no room."""
        count, previous = 0, request.cache_salt.encode()
        if not self._enabled or request.prompt_logprobs:
            return 0
        prompt = len(request.tokens) - request.generated
        for number in range((len(request.tokens) - 1) // BLOCK_SIZE):
            content = self._content_of(request.tokens, prompt, number)
            previous = chain(previous, content)
            block = self._blocks.find(previous, content)
            if block is None or not self._blocks.held(block):
                break
            count += 1
        return count

    def _content(self, slot: int, number: int) -> bytes:
        return self._content_of(self._rows.tokens[slot], int(self._rows.prompt[slot]), number)

    def _content_of(self, tokens: npt.NDArray[np.int32], prompt: int, number: int) -> bytes:
        """The tokens of a block, and where in it those begin that are not of the prompt, if that matters."""
        at = number * BLOCK_SIZE
        content = tokens[at : at + BLOCK_SIZE].tobytes()
        begins_here = self._prompts_differ and at <= prompt < at + BLOCK_SIZE
        return content + bytes([prompt - at]) if begins_here else content
