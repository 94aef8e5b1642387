"""The running batch: every admitted request as a row of preallocated arrays. Rows are stable; nothing is rebuilt."""

from __future__ import annotations

import numpy as np

from headrace_shard.grammar.state import Constraint
from headrace_shard.kv.blocks import blocks_for
from headrace_shard.requests import Request, TopTokens


class RunningBatch:
    """Struct of arrays, one entry a slot. A slot is free, or holds one request from admission to its end.

    Attributes:
        tokens: [slots, max tokens] prompt and output.
        known, computed: [slots] tokens that are there; tokens whose K and V are in the cache.
        prompt: [slots] how many of the tokens are the prompt.
        table, held: [slots, max blocks] block numbers; [slots] how many of them are in use.
        cached, stored: [slots] prompt tokens that came from the prefix cache; full blocks that are known to it.
        drafted, accepted: [slots] draft tokens computed so far; how many of them were right.
        order: [slots] admission number; the largest is the youngest.
        constraints: of the slots whose output is constrained by a grammar.
    """

    def __init__(self, slots: int, max_tokens: int) -> None:
        self.slots, self.max_tokens = slots, max_tokens
        self._free = list(range(slots - 1, -1, -1))
        self._admissions = 0
        self.tokens = np.zeros((slots, max_tokens), dtype=np.int32)
        self.table = np.zeros((slots, blocks_for(max_tokens)), dtype=np.int32)
        self.held = np.zeros(slots, dtype=np.int32)
        self.known = np.zeros(slots, dtype=np.int64)
        self.computed = np.zeros(slots, dtype=np.int64)
        self.cached = np.zeros(slots, dtype=np.int64)
        self.stored = np.zeros(slots, dtype=np.int64)
        self.drafted = np.zeros(slots, dtype=np.int64)
        self.accepted = np.zeros(slots, dtype=np.int64)
        self.prompt = np.zeros(slots, dtype=np.int64)
        self.max_new = np.zeros(slots, dtype=np.int64)
        self.order = np.zeros(slots, dtype=np.int64)
        self.priority = np.zeros(slots, dtype=np.int64)
        self.batch = np.zeros(slots, dtype=np.int64)
        self.ids = np.zeros(slots, dtype=np.uint64)
        self.ends_at_eos = np.zeros(slots, dtype=bool)
        self.special = np.zeros(slots, dtype=bool)  # asks for details of every step, or has stop ids
        self.requests: list[Request | None] = [None] * slots
        self.prompt_scores: list[list[float]] = [[] for _ in range(slots)]
        self.prompt_top: list[list[TopTokens]] = [[] for _ in range(slots)]
        self.constraints: dict[int, Constraint] = {}

    @property
    def free(self) -> int:
        """Slots that hold no request."""
        return len(self._free)

    def add(self, request: Request, batch_id: int) -> int:
        """Put a request into a free slot and return the slot."""
        slot = self._free.pop()
        count = len(request.tokens)
        self._admissions += 1
        self.tokens[slot, :count] = request.tokens
        self.held[slot] = self.computed[slot] = self.cached[slot] = self.stored[slot] = 0
        self.drafted[slot] = self.accepted[slot] = 0
        self.known[slot], self.prompt[slot] = count, count - request.generated
        self.max_new[slot] = request.max_new
        self.order[slot], self.priority[slot] = self._admissions, request.priority
        self.batch[slot], self.ids[slot] = batch_id, request.id
        # Nothing can follow an end token in a grammar; it allows one where it must.
        self.ends_at_eos[slot] = not request.ignore_eos or request.constraint is not None
        self.special[slot] = bool(request.top_n or request.detokenizer or request.stop_ids or request.prompt_logprobs)
        self.requests[slot] = request
        self.prompt_scores[slot], self.prompt_top[slot] = [], []
        if request.constraint is not None:
            self.constraints[slot] = request.constraint
        return slot

    def request(self, slot: int) -> Request:
        """The request in a slot that holds one."""
        request = self.requests[slot]
        assert request is not None
        return request

    def in_prompt(self, slot: int) -> bool:
        """Whether the token that is to be computed next is one of the prompt."""
        return bool(self.computed[slot] < self.prompt[slot])

    def tokens_left(self, slot: int) -> int:
        """How many more tokens the request's own limit allows."""
        return int(self.max_new[slot] + self.prompt[slot] - self.known[slot])

    def blocks(self, slot: int) -> list[int]:
        """Block numbers that the slot holds."""
        numbers: list[int] = self.table[slot, : self.held[slot]].tolist()
        return numbers

    def hold(self, slot: int, blocks: list[int]) -> None:
        """Append blocks to the slot's table."""
        at = int(self.held[slot])
        self.table[slot, at : at + len(blocks)] = blocks
        self.held[slot] = at + len(blocks)

    def remove(self, slot: int) -> list[int]:
        """Free the slot; returns the blocks it held."""
        blocks = self.blocks(slot)
        self.requests[slot] = None
        self.constraints.pop(slot, None)
        self.held[slot] = 0
        self._free.append(slot)
        return blocks
