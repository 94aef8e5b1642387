"""What the tokens of a step mean for its requests: appended to their rows, reported to their calls, ended if they are done."""

from __future__ import annotations

import math

import numpy as np

from headrace_shard.calls import BatchTable
from headrace_shard.grammar import steps as grammar_steps
from headrace_shard.grammar.compiler import GrammarCompiler
from headrace_shard.kv.blocks import BLOCK_SIZE
from headrace_shard.requests import EOS_TOKEN, ERROR, LENGTH, STOP_TOKEN, UNFINISHED, Detail
from headrace_shard.sampling.sampler import Choice
from headrace_shard.scheduler import Plan
from headrace_shard.step import Ints


class Outcome:
    """Writes the results of steps into the table."""

    def __init__(
        self, table: BatchTable, eos_ids: tuple[int, ...], vocab_size: int, grammars: GrammarCompiler | None
    ) -> None:
        self._table, self._rows, self._prefix, self._grammars = table, table.rows, table.prefix, grammars
        self._is_eos = np.zeros(vocab_size, dtype=bool)
        self._is_eos[[i for i in eos_ids if i < vocab_size]] = True

    def record(self, plan: Plan, choice: Choice) -> dict[int, int]:
        """Append the tokens, write the batches' results, free what has ended.

        A row with draft tokens has several choices. The first always counts; the one behind a draft token counts if that
        token is what was chosen in its place.

        Returns:
            Slots that had draft tokens, and how many of them were right.
        """
        rows, table = self._rows, self._table
        known = {slot: int(rows.known[slot]) for slot in rows.constraints}
        rows.computed[plan.slots] += plan.counts
        failed = plan.sampled[choice.failed]
        self._store(np.setdiff1d(plan.slots, failed) if len(failed) else plan.slots)
        right: dict[int, int] = {}
        if plan.draft_tokens:
            right = dict.fromkeys(plan.sampled[plan.rounds == 1].tolist(), 0)
            np.add.at(rows.drafted, plan.sampled[plan.rounds > 0], 1)
        at = np.nonzero(plan.rounds == 0)[0]
        going = self._append(plan, choice, at)
        while right and len(at):
            behind = at[going] + 1
            behind = behind[behind < len(plan.sampled)]
            behind = behind[plan.rounds[behind] > 0]
            at = behind[plan.fed[behind] == choice.tokens[behind - 1]]
            slots = plan.sampled[at]
            for slot in slots.tolist():
                right[slot] += 1
            rows.computed[slots] += 1
            rows.accepted[slots] += 1
            self._store(slots[~choice.failed[at]])
            going = self._append(plan, choice, at)
        for batch in table.at_work():
            if batch.call and (batch.call.result or bool((rows.batch[plan.slots] == batch.id).any())):
                table.result_of(batch)
                batch.call.steps += 1
        if rows.constraints and self._grammars is not None:
            grammar_steps.advance(known, rows, self._grammars)
        return right

    def fail(self, plan: Plan, message: str) -> None:
        """End every request of a step that could not be run."""
        for slot in np.unique(plan.slots).tolist():
            self.fail_row(slot, message)
        for batch in self._table.at_work():
            if batch.call and batch.call.result:
                batch.call.steps += 1

    def fail_row(self, slot: int, message: str) -> None:
        """End one request with an error."""
        rows, prompt = self._rows, int(self._rows.prompt[slot])
        batch = self._table.batches[int(rows.batch[slot])]
        self._table.result_of(batch).details.append(Detail(
            rows.request(slot).id, ERROR, message, prompt_tokens=prompt, generated_tokens=int(rows.known[slot]) - prompt,
        ))
        self._table.drop(slot)

    def _store(self, slots: Ints) -> None:
        """Make the blocks of rows known to the prefix cache that have become full."""
        rows = self._rows
        for slot in slots[rows.computed[slots] // BLOCK_SIZE > rows.stored[slots]].tolist():
            if rows.requests[slot] is not None:  # else its grammar has failed
                self._prefix.store(slot)

    def _append(self, plan: Plan, choice: Choice, at: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Append the choices `at` to their rows, one each; returns which of the rows go on."""
        rows, table = self._rows, self._table
        slots, tokens, failed = plan.sampled[at], choice.tokens[at], choice.failed[at]
        known = rows.known[slots] + 1
        rows.tokens[slots, np.minimum(known, rows.max_tokens) - 1] = tokens
        rows.known[slots] = known
        generated = known - rows.prompt[slots]
        eos = self._is_eos[tokens] & rows.ends_at_eos[slots]
        full = (generated >= rows.max_new[slots]) | (known >= rows.max_tokens)
        ids, owners, logprobs = rows.ids[slots], rows.batch[slots], choice.logprobs[at]
        for batch in table.at_work():
            mine = np.nonzero((owners == batch.id) & ~failed)[0]
            if len(mine) and batch.call:
                result = table.result_of(batch)
                result.request_ids += ids[mine].tolist()
                result.token_ids += tokens[mine].tolist()
                result.logprobs += logprobs[mine].tolist()
                if batch.call.waiting:
                    batch.call.waiting.difference_update(slots[mine].tolist())
        reused = (rows.cached[slots] > 0) & (generated == 1)
        ended = failed | eos | full
        for i in np.nonzero(ended | reused | rows.special[slots])[0].tolist():
            reason = ERROR if failed[i] else EOS_TOKEN if eos[i] else LENGTH if full[i] else UNFINISHED
            ended[i] = self._detail(int(slots[i]), int(tokens[i]), reason, choice.top.get(int(at[i])))
        return ~ended

    def _detail(self, slot: int, token: int, reason: int, top: tuple[list[int], list[float]] | None) -> bool:
        """More about one row that asked for it or has ended; frees the row if it has, and says so."""
        rows = self._rows
        request, prompt = rows.request(slot), int(rows.prompt[slot])
        if token in request.stop_ids and reason in (0, LENGTH):
            reason = STOP_TOKEN
        generated = int(rows.known[slot]) - prompt
        detail = Detail(
            request.id, reason, tokens=[token], seed=request.params.seed if request.params.sampled else 0,
            prompt_tokens=prompt, generated_tokens=generated, cached_tokens=int(rows.cached[slot]),
            draft_tokens=int(rows.drafted[slot]), accepted_tokens=int(rows.accepted[slot]), detokenizer=request.detokenizer,
        )
        if top is not None:
            detail.top.append(top)
        if request.prompt_logprobs and generated == 1:
            scores = [math.nan, *rows.prompt_scores[slot]]
            detail.prompt_logprobs = (rows.tokens[slot, :prompt].tolist(), scores)
            if request.prompt_top_n:
                detail.prompt_top = [([], []), *rows.prompt_top[slot]]
        if reason == ERROR:
            detail.tokens, detail.generated_tokens = [], generated - 1
            detail.message = "the model's logits are not finite numbers"
            self._prefix.forget(slot)
        if reason or (detail.cached_tokens and generated == 1) or detail.top or detail.detokenizer or detail.prompt_logprobs:
            self._table.result_of(self._table.batches[int(rows.batch[slot])]).add(detail)
        if reason:
            self._table.drop(slot)
        return reason > 0
