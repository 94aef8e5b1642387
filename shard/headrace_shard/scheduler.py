"""Who runs in the next step: decode rows first, then prompt chunks up to the token budget; preemption when KV runs dry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace_shard.batch import RunningBatch
from headrace_shard.calls import Batch, BatchTable
from headrace_shard.kv.blocks import BLOCK_SIZE, blocks_for
from headrace_shard.requests import Timings
from headrace_shard.step import Chunk, Ints, StepInput


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logits rows `at`..`at + count` score the prompt tokens after position `start` of a slot."""

    slot: int
    at: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the forward pass, and what its logits are for.

    Attributes:
        slots, counts: [rows] the rows that take part, and how many tokens of each are computed.
        sampled, sample_at: [sampled rows] slots that get a token, and their places among the logits.
    """

    input: StepInput
    slots: Ints
    counts: Ints
    sampled: Ints
    sample_at: Ints
    scores: tuple[PromptScores, ...]
    decode_tokens: int
    prefill_tokens: int


class Pace:
    """What steps cost, from recent ones: seconds of the decode rows, and of each prompt token beside them."""

    WEIGHT = 0.2  # of the newest step in the moving averages

    def __init__(self) -> None:
        self._decode = 0.0
        self._per_token = 0.0

    def learn(self, timings: Timings) -> None:
        """Take in one step's timings."""
        if timings.prefill_tokens:
            cost = max(0.0, timings.total - (self._decode if timings.decode_tokens else 0.0)) / timings.prefill_tokens
            self._per_token += (cost - self._per_token) * (self.WEIGHT if self._per_token else 1.0)
        elif timings.decode_tokens:
            self._decode += (timings.total - self._decode) * (self.WEIGHT if self._decode else 1.0)

    def prompt_tokens(self, target: float) -> int:
        """Prompt tokens that fit beside the decode rows in `target` seconds; at least one block, so that prompts move."""
        if not self._per_token:
            return BLOCK_SIZE
        return max(BLOCK_SIZE, int((target - self._decode) / self._per_token))


class Scheduler:
    """Plans one step after another over the rows of the batches at work."""

    def __init__(self, table: BatchTable, max_step_tokens: int) -> None:
        self._table, self._max_step_tokens = table, max_step_tokens
        self._rows, self._blocks = table.rows, table.blocks
        self.pace = Pace()

    def plan(self) -> Plan | None:
        """The next step, or None if no row can run. Rows that had to go for lack of KV blocks are preempted."""
        working = self._table.at_work()
        ready = [b for b in working if b.call and not b.call.blocked]
        active = [slot for batch in ready for slot in batch.slots.values()]
        rows = self._rows
        if rows.constraints:
            active = [slot for slot in active if not (c := rows.constraints.get(slot)) or not c.sits_out]
        if not active:
            return None
        slots = np.array(active, dtype=np.int64)
        slots = slots[np.lexsort((rows.order[slots], -rows.priority[slots]))]  # highest priority first, oldest first
        decoding = rows.known[slots] - rows.computed[slots] == 1
        decode = self._with_room(slots[decoding], working)
        prompts = [int(s) for s in slots[~decoding] if rows.requests[s] is not None]
        chunks = self._chunks(prompts, self._budget(ready, len(decode)), working, starving=not len(decode))
        return build(rows, decode, chunks) if len(decode) or chunks else None

    def _budget(self, ready: list[Batch], decode_rows: int) -> int:
        """Prompt tokens of this step: the smallest limit of the calls at work."""
        calls = [b.call for b in ready if b.call]
        limits = [c.max_step_tokens for c in calls if c.max_step_tokens]
        budget = min([self._max_step_tokens, *limits]) - decode_rows
        targets = [c.itl_target for c in calls if c.itl_target]
        if targets and decode_rows:
            budget = min(budget, self.pace.prompt_tokens(min(targets)))
        # Decode rows that fill the budget must not stop prompts for good.
        return max(budget, 1)

    def _with_room(self, decode: Ints, working: list[Batch]) -> Ints:
        """The decode rows that have a place for their next token; others sit out."""
        rows = self._rows
        lacking = decode[rows.computed[decode] >= rows.held[decode].astype(np.int64) * BLOCK_SIZE]
        for slot in lacking.tolist():
            while rows.requests[slot] is not None and not self._grow(slot, int(rows.known[slot])):
                if not self._preempt_one(working):
                    break
        alive = np.array([rows.requests[s] is not None for s in decode], dtype=bool)
        decode = decode[alive]
        return decode[rows.computed[decode] < rows.held[decode].astype(np.int64) * BLOCK_SIZE]

    def _chunks(self, prompts: list[int], budget: int, working: list[Batch], starving: bool) -> list[tuple[int, int]]:
        """(slot, tokens) of each prompt that moves in this step. `starving`: nothing else would run."""
        rows, chunks = self._rows, []
        for slot in prompts:
            while rows.requests[slot] is not None and budget > 0:
                left = int(rows.known[slot] - rows.computed[slot])
                room = (int(rows.held[slot]) + self._blocks.free) * BLOCK_SIZE - int(rows.computed[slot])
                count = min(left, budget, room)
                if count > 0:
                    self._grow(slot, int(rows.computed[slot]) + count)
                    chunks.append((slot, count))
                    budget -= count
                    break
                if chunks or not starving or not self._preempt_one(working):
                    break
        return chunks

    def _grow(self, slot: int, tokens: int) -> bool:
        """Give the row the blocks for so many tokens."""
        missing = blocks_for(tokens) - int(self._rows.held[slot])
        if missing <= 0:
            return True
        taken = self._blocks.allocate(missing)
        if taken is None:
            return False
        self._rows.hold(slot, taken)
        return True

    def _preempt_one(self, working: list[Batch]) -> bool:
        """Preempt the youngest row of the lowest priority; never the oldest of the highest. False: there is no other."""
        slots = np.array([s for b in working for s in b.slots.values()], dtype=np.int64)
        if len(slots) < 2:
            return False
        rows = self._rows
        ranked = slots[np.lexsort((-rows.order[slots], rows.priority[slots]))]
        self._table.preempt(int(ranked[0]))
        return True


def build(rows: RunningBatch, decode: Ints, chunks: list[tuple[int, int]]) -> Plan:
    """The arrays of a step: one token of each decode row, then the chunks."""
    known, computed = rows.known, rows.computed
    positions, owners = [computed[decode]], [decode]
    parts: list[Chunk] = []
    sampled, sample_at = [decode], [np.arange(len(decode), dtype=np.int64)]
    wanted = [np.arange(len(decode), dtype=np.int64)]
    scores: list[PromptScores] = []
    offset = logits = len(decode)
    for slot, count in chunks:
        start = int(computed[slot])
        positions.append(np.arange(start, start + count, dtype=np.int64))
        owners.append(np.full(count, slot, dtype=np.int64))
        parts.append(Chunk(offset, count, start, rows.table[slot, : blocks_for(start + count)].copy()))
        complete = start + count == known[slot]
        request = rows.request(slot)
        # Log probabilities of the prompt go with the first token: a request that resumes has sent them already.
        scored = request.prompt_logprobs and not request.generated
        first = offset if scored else offset + count - 1
        if scored or complete:
            wanted.append(np.arange(first, offset + count, dtype=np.int64))
            if scored:
                scores.append(PromptScores(slot, logits, min(count, int(known[slot]) - start - 1), start))
            logits += offset + count - first
            if complete:
                sampled.append(np.array([slot], dtype=np.int64))
                sample_at.append(np.array([logits - 1], dtype=np.int64))
        offset += count
    position, owner = np.concatenate(positions), np.concatenate(owners)
    width = blocks_for(int(computed[decode].max()) + 1) if len(decode) else 0
    inputs = StepInput(
        token_ids=rows.tokens[owner, position].astype(np.int64), positions=position,
        slots=rows.table[owner, position // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + position % BLOCK_SIZE,
        decode_tables=rows.table[decode, :width], decode_lengths=computed[decode] + 1, chunks=tuple(parts),
        logit_rows=np.concatenate(wanted),
    )
    counts = np.concatenate((np.ones(len(decode), dtype=np.int64), np.array([c for _, c in chunks], dtype=np.int64)))
    slots = np.concatenate((decode, np.array([s for s, _ in chunks], dtype=np.int64)))
    return Plan(
        inputs, slots, counts, np.concatenate(sampled), np.concatenate(sample_at), tuple(scores), len(decode),
        offset - len(decode),
    )
