"""Who runs in the next step: decode rows first, then chunks up to the token budget; preemption when KV runs dry.

A chunk is of a prompt, or of generated tokens that are computed again, never of both: a backend may compute the two kinds
differently, and a row's result must depend on nothing but its kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace_shard.batch import RunningBatch
from headrace_shard.calls import Batch, BatchTable
from headrace_shard.kv.blocks import BLOCK_SIZE, blocks_for
from headrace_shard.pace import Pace
from headrace_shard.speculation import Speculation
from headrace_shard.step import Chunk, Ints, StepInput

OLDEST = 4  # a part so large of a step's prompt tokens is for the prompt that has been there longest, whatever its priority


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
        slots, counts: [rows] the rows that take part, and how many tokens of each count as computed, whatever is chosen.
        sampled, sample_at: [choices] slots that get a token, and their places among the logits. A row with draft tokens
            has one choice more than it has of these, in order.
        rounds, fed: [choices] 0, or which draft token the choice is behind; the token whose logits it is made of.
    """

    input: StepInput
    slots: Ints
    counts: Ints
    sampled: Ints
    sample_at: Ints
    rounds: Ints
    fed: Ints
    scores: tuple[PromptScores, ...]
    decode_tokens: int
    prefill_tokens: int
    draft_tokens: int

    def drafted(self, slot: int) -> int:
        """Draft tokens of a slot."""
        return int((self.sampled == slot).sum()) - 1


class Scheduler:
    """Plans one step after another over the rows of the batches at work."""

    def __init__(self, table: BatchTable, max_step_tokens: int, speculation: Speculation) -> None:
        self._table, self._max_step_tokens, self._speculation = table, max_step_tokens, speculation
        self._rows, self._blocks, self._prefix = table.rows, table.blocks, table.prefix
        self.pace = Pace()

    def plan(self) -> Plan | None:
        """The next step, or None if no row can run. Rows that had to go for lack of KV blocks are preempted."""
        self._speculation.begin()
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
        # A prompt's last token is a chunk of one.
        decoding = (rows.known[slots] - rows.computed[slots] == 1) & (rows.computed[slots] >= rows.prompt[slots])
        decode = self._with_room(slots[decoding], working)
        prompts = [int(s) for s in slots[~decoding] if rows.requests[s] is not None]
        chunks: list[tuple[int, int]] = []
        drafts: dict[int, int] = {}
        if prompts:  # while they wait, the budget is theirs
            chunks = self._chunks(prompts, self._budget(ready, len(decode)), working, starving=not len(decode))
        else:
            drafts = self._drafts(decode)
        return build(rows, decode, chunks, drafts) if len(decode) or chunks else None

    def _drafts(self, decode: Ints) -> dict[int, int]:
        """How many draft tokens which slots have; they never cost another row its place."""
        return self._speculation.propose(decode, self._max_step_tokens - len(decode), self._grow, self.pace)

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
        if not len(lacking):
            return decode
        for slot in lacking.tolist():
            while rows.requests[slot] is not None and not self._grow(slot, int(rows.known[slot])):
                if not self._preempt_one(working):
                    break
        alive = np.array([rows.requests[s] is not None for s in decode], dtype=bool)
        decode = decode[alive]
        return decode[rows.computed[decode] < rows.held[decode].astype(np.int64) * BLOCK_SIZE]

    def _chunks(self, prompts: list[int], budget: int, working: list[Batch], starving: bool) -> list[tuple[int, int]]:
        """(slot, tokens) of each prompt that moves in this step, the most urgent first, but a part is kept for the
        oldest. `starving`: nothing else would run.
        """
        rows, chunks = self._rows, []
        coming: set[bytes] = set()  # keys of the blocks that this step computes
        oldest = min(prompts, key=lambda slot: int(rows.order[slot]))
        kept = budget // OLDEST
        for slot in prompts:
            if slot == oldest:
                kept = 0
            if rows.requests[slot] is None or budget <= kept:
                continue
            if self._prefix.extend(slot) in coming:
                continue  # in the next step this block is there
            while rows.requests[slot] is not None:
                start = int(rows.computed[slot])
                room = (int(rows.held[slot]) + self._blocks.free) * BLOCK_SIZE - start
                end = int((rows.prompt if rows.in_prompt(slot) else rows.known)[slot])
                count = whole_blocks(start, end - start, min(budget - kept, room))
                if count > 0:
                    self._grow(slot, start + count)
                    coming.update(self._prefix.keys(slot, start, start + count))
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


def whole_blocks(start: int, left: int, most: int) -> int:
    """How many of the `left` tokens from `start` on to compute: all, else up to the end of a block where that is possible.

    The next chunk then starts at a block, and may find it in the prefix cache.
    """
    if left <= most:
        return left
    aligned = (start + most) // BLOCK_SIZE * BLOCK_SIZE - start
    return aligned if aligned > 0 else most


def build(rows: RunningBatch, decode: Ints, chunks: list[tuple[int, int]], drafts: dict[int, int]) -> Plan:
    """The arrays of a step: one token of each decode row, then the rows with draft tokens behind their last one, then the
    chunks, those of prompts last. `drafts`: slots of `decode` and how many draft tokens they have.
    """
    known, computed = rows.known, rows.computed
    if drafts:
        decode = decode[~np.isin(decode, list(drafts))]
    positions, owners = [computed[decode]], [decode]
    parts: list[Chunk] = []
    sampled, sample_at = [decode], [np.arange(len(decode), dtype=np.int64)]
    rounds = [np.zeros(len(decode), dtype=np.int64)]
    wanted = [np.arange(len(decode), dtype=np.int64)]
    scores: list[PromptScores] = []
    offset = logits = len(decode)
    chunks = sorted(chunks, key=lambda chunk: rows.in_prompt(chunk[0]))
    for slot, count in (*((slot, count + 1) for slot, count in drafts.items()), *chunks):
        start, drafted = int(computed[slot]), drafts.get(slot, 0)
        positions.append(np.arange(start, start + count, dtype=np.int64))
        owners.append(np.full(count, slot, dtype=np.int64))
        parts.append(Chunk(offset, count, start, rows.table[slot, : blocks_for(start + count)].copy()))
        complete = start + count - drafted == known[slot]
        request = rows.request(slot)
        # Log probabilities of the prompt go with the first token: a request that resumes has sent them already.
        scored = request.prompt_logprobs and not request.generated and not drafted
        first = offset if scored or drafted else offset + count - 1
        if scored or complete:
            wanted.append(np.arange(first, offset + count, dtype=np.int64))
            if scored:
                scores.append(PromptScores(slot, logits, min(count, int(known[slot]) - start - 1), start))
            logits += offset + count - first
            if complete:
                sampled.append(np.full(drafted + 1, slot, dtype=np.int64))
                sample_at.append(np.arange(logits - 1 - drafted, logits, dtype=np.int64))
                rounds.append(np.arange(drafted + 1, dtype=np.int64))
        offset += count
    position, owner = np.concatenate(positions), np.concatenate(owners)
    width = blocks_for(int(computed[decode].max()) + 1) if len(decode) else 0
    inputs = StepInput(
        token_ids=rows.tokens[owner, position].astype(np.int64), positions=position,
        slots=rows.table[owner, position // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + position % BLOCK_SIZE,
        decode_tables=rows.table[decode, :width], decode_lengths=computed[decode] + 1, chunks=tuple(parts),
        logit_rows=np.concatenate(wanted),
        prompts=sum(count for slot, count in chunks if rows.in_prompt(slot)),
    )
    moved = [(slot, 1) for slot in (*decode.tolist(), *drafts)] + chunks
    slots, counts = np.array(moved, dtype=np.int64).reshape(-1, 2).T
    places = np.concatenate(sample_at)
    decode_tokens, draft_tokens = len(decode) + len(drafts), sum(drafts.values())
    return Plan(
        inputs, slots, counts, np.concatenate(sampled), places, np.concatenate(rounds),
        inputs.token_ids[inputs.logit_rows[places]], tuple(scores), decode_tokens,
        prefill_tokens=offset - decode_tokens - draft_tokens, draft_tokens=draft_tokens,
    )
