"""The draft model: a small model of the same vocabulary guesses what the large one will say.

It runs on the leading rank alone, before the step: one pass for each guess, over all rows that want one. Its choices are
made as the large model's are, with the request's penalties, filters, grammar and the very random number of that place; so
it guesses right whenever the two distributions agree there, and text never depends on it (`speculation`).

Its KV cache is its own: blocks are taken when a row first wants a guess, and given to others when they want them. What is
missing of a row, its prompt at first, is computed again; nothing is shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from headrace_shard.batch import RunningBatch
from headrace_shard.grammar.compiler import PATIENCE, GrammarCompiler
from headrace_shard.kv.blocks import BLOCK_SIZE, BlockManager, blocks_for
from headrace_shard.pace import Pace
from headrace_shard.sampling.passes import Passes
from headrace_shard.sampling.sampler import Row, choose
from headrace_shard.step import Chunk, StepInput

NEVER = -1e30  # logit of a token that the draft model does not know


class Forward(Protocol):
    """What is asked of the model itself."""

    vocab_size: int

    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits [logit rows, vocab], float32."""


@dataclass(frozen=True)
class DraftModel:
    """A draft model that is ready to run. `window`: its longest sequence; `blocks`: of its KV cache."""

    model: Forward
    window: int
    blocks: int


class Drafter:
    """Runs the draft model for rows of the running batch."""

    def __init__(
        self, draft: DraftModel, rows: RunningBatch, vocab_size: int, ends: frozenset[int], passes: Passes,
        sampling_row: Callable[[int, int], Row], grammars: GrammarCompiler | None,
    ) -> None:
        """`vocab_size`: of the large model; `sampling_row(slot, n)`: what the sampler must know to choose behind n drafts."""
        self._model, self._window, self._vocab_size, self._ends = draft.model, draft.window, vocab_size, ends
        self._rows, self._passes, self._sampling_row, self._grammars = rows, passes, sampling_row, grammars
        self.blocks = BlockManager(draft.blocks)
        self._table = np.zeros((rows.slots, blocks_for(rows.max_tokens)), dtype=np.int32)
        self._order = np.zeros(rows.slots, dtype=np.int64)  # admission that the slot's entries are about
        self._computed = np.zeros(rows.slots, dtype=np.int64)  # tokens in the draft model's cache
        self._unsure = np.zeros(rows.slots, dtype=np.int64)  # draft tokens behind them that are there too
        self._held: dict[int, list[int]] = {}  # blocks by slot, the slot that was used last at the end

    def release(self) -> None:
        """Give up the blocks of requests that have left."""
        for slot in [s for s in self._held if self._rows.requests[s] is None or self._order[s] != self._rows.order[s]]:
            self._drop(slot)

    def backlog(self, slot: int) -> int:
        """Known tokens of a row that the draft model has not taken in; one or two while it keeps up."""
        return int(self._rows.known[slot] - self._seen(slot))

    def most(self, slot: int) -> int:
        """Guesses behind a row's known tokens that fit into the draft model's window."""
        return self._window - int(self._rows.known[slot])

    def guess(self, wanted: dict[int, int], budget: int, pace: Pace) -> dict[int, int]:
        """Write draft tokens behind the known ones of rows, as many as `wanted` at most; returns how many each has.

        `budget`: tokens to take in at most; a row with more to catch up goes on with that in the next step.
        """
        counts = dict.fromkeys(wanted, 0)
        feed = self._backlogs(wanted, budget)
        for slot in feed:
            self._computed[slot] = self._seen(slot)
            self._unsure[slot] = 0
            if self._rows.request(slot).constraint is not None and self._grammars is not None:
                self._grammars.branch(self._rows.constraints[slot])
        drafted = 0
        while feed:
            logits = self._take_in(feed, drafted, pace)
            going = self._choose({s: x for s, x in logits.items() if sum(feed[s]) == self._rows.known[s] + drafted}, drafted)
            drafted += 1
            counts.update(dict.fromkeys(going, drafted))
            feed = {
                slot: (int(self._rows.known[slot]) + drafted - 1, 1)
                for slot, ended in going.items() if not ended and drafted < wanted[slot]
            }
        return {slot: count for slot, count in counts.items() if count}

    def learn(self, slot: int, right: int) -> None:
        """So many of a row's guesses were right: what was computed of them stays."""
        self._computed[slot] += min(right, int(self._unsure[slot]))
        self._unsure[slot] = 0

    def _seen(self, slot: int) -> int:
        """Tokens of the row's request that are in the cache; at least the last known one is computed anew."""
        if self._order[slot] != self._rows.order[slot]:
            return 0
        return min(int(self._computed[slot]), int(self._rows.known[slot]) - 1)

    def _backlogs(self, wanted: dict[int, int], budget: int) -> dict[int, tuple[int, int]]:
        """(first position, tokens) of what each row has to catch up, as far as budget and blocks go; the least first."""
        feed = {}
        for slot, most in sorted(wanted.items(), key=lambda item: self.backlog(item[0])):
            start, known = self._seen(slot), int(self._rows.known[slot])
            count = min(known - start, budget)
            if count > 0 and self._reserve(slot, known + most, wanted):
                feed[slot] = start, count
                budget -= count
        return feed

    def _reserve(self, slot: int, tokens: int, busy: Container[int]) -> bool:
        """Hold blocks for so many tokens of the row, if need be those of rows that are not `busy`, the last used one last."""
        if self._order[slot] != self._rows.order[slot]:
            self._drop(slot)
            self._order[slot] = self._rows.order[slot]
        held = self._held.pop(slot, [])
        self._held[slot] = held  # the last one now
        missing = blocks_for(tokens) - len(held)
        while missing > self.blocks.free:
            idle = next((s for s in self._held if s not in busy), None)
            if idle is None:
                return False
            self._drop(idle)
        taken = self.blocks.allocate(max(missing, 0)) or []
        self._table[slot, len(held) : len(held) + len(taken)] = taken
        held += taken
        return True

    def _drop(self, slot: int) -> None:
        self.blocks.release(self._held.pop(slot, []))
        self._order[slot] = self._computed[slot] = self._unsure[slot] = 0

    def _take_in(self, feed: dict[int, tuple[int, int]], drafted: int, pace: Pace) -> dict[int, torch.Tensor]:
        """One pass over (first position, tokens) of each row; the logits [vocab] behind each row's last one."""
        begin = time.perf_counter()
        step, order = self._step(feed)
        logits = fit(self._model.forward(step), self._vocab_size)
        for slot, (_, count) in feed.items():
            if drafted:
                self._unsure[slot] += 1
            else:
                self._computed[slot] += count
        pace.learn_draft(time.perf_counter() - begin, len(feed), len(step.token_ids))
        return dict(zip(order, logits, strict=True))

    def _step(self, feed: dict[int, tuple[int, int]]) -> tuple[StepInput, list[int]]:
        """The pass, and its rows in the order of its logits. No text depends on it: a chunk that begins in a prompt counts as
        all prompt.
        """
        single = [slot for slot, (_, count) in feed.items() if count == 1]
        several = [slot for slot, (_, count) in feed.items() if count > 1]
        prompts = [slot for slot in several if feed[slot][0] < self._rows.prompt[slot]]
        order = single + [slot for slot in several if slot not in prompts] + prompts
        positions = np.concatenate([np.arange(feed[s][0], sum(feed[s]), dtype=np.int64) for s in order])
        counts = np.array([feed[s][1] for s in order], dtype=np.int64)
        owners, ends = np.repeat(np.array(order, dtype=np.int64), counts), np.cumsum(counts)
        lengths = np.array([feed[s][0] + 1 for s in single], dtype=np.int64)
        chunks = tuple(
            Chunk(int(end - feed[s][1]), feed[s][1], feed[s][0], self._table[s, : blocks_for(sum(feed[s]))])
            for s, end in zip(order, ends, strict=True) if feed[s][1] > 1
        )
        tokens = np.minimum(self._rows.tokens[owners, positions].astype(np.int64), self._model.vocab_size - 1)
        slots = self._table[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        width = blocks_for(int(lengths.max())) if single else 0
        step = StepInput(
            tokens, positions, slots, self._table[single, :width], lengths, chunks, ends - 1,
            prompts=sum(feed[slot][1] for slot in prompts),
        )
        return step, order

    def _choose(self, logits: dict[int, torch.Tensor], drafted: int) -> dict[int, bool]:
        """Write the next draft token of rows with these logits; says of each that has one whether it is an end."""
        rows = self._rows
        constraints = {slot: c for slot in logits if (c := rows.constraints.get(slot))}
        if constraints and self._grammars is not None:
            self._grammars.wait(list(constraints.values()), PATIENCE)
            logits = {s: x for s, x in logits.items() if s not in constraints or constraints[s].knows(drafted)}
        if not logits:
            return {}
        sampling = [replace(self._sampling_row(slot, drafted), top_n=0) for slot in logits]
        choice = choose(torch.stack(list(logits.values())), sampling, self._passes)
        going = {}
        for slot, token, failed in zip(logits, choice.tokens.tolist(), choice.failed.tolist(), strict=True):
            if failed:
                continue
            rows.tokens[slot, rows.known[slot] + drafted] = token
            going[slot] = token in self._ends
            if slot in constraints and self._grammars is not None:
                self._grammars.look(constraints[slot], [token], rows.tokens_left(slot))
        return going


def fit(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits [rows, own vocab] over a vocabulary of another size: paddings of one tokenizer's differ from model to model."""
    missing = vocab_size - logits.shape[1]
    return F.pad(logits, (0, missing), value=NEVER) if missing > 0 else logits[:, :vocab_size]
