"""What constraints mean for one step: which of its rows can get a token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace_shard.batch import RunningBatch
from headrace_shard.grammar.compiler import GrammarCompiler
from headrace_shard.grammar.state import Constraint
from headrace_shard.scheduler import Plan

PATIENCE = 0.010  # seconds that a step waits for masks after its forward pass


def settle(plan: Plan, constraints: dict[int, Constraint], grammars: GrammarCompiler) -> tuple[Plan, dict[int, str]]:
    """The plan without the rows that cannot get a token, and why some of them (slots) never will.

    The others are late: their last token is computed again as soon as they are ready, and until then they sit out.
    """
    concerned = [(at, c) for at, slot in enumerate(plan.sampled.tolist()) if (c := constraints.get(slot))]
    if not concerned:
        return plan, {}
    grammars.wait([c for _, c in concerned], PATIENCE)
    kept = np.ones(len(plan.sampled), dtype=bool)
    failed: dict[int, str] = {}
    late = []
    for at, constraint in concerned:
        slot = int(plan.sampled[at])
        if constraint.late:
            late.append(slot)
        elif constraint.error is not None:
            failed[slot] = constraint.error
        else:
            continue
        kept[at] = False
    if kept.all():
        return plan, failed
    counts = plan.counts - np.isin(plan.slots, late)
    plan = replace(
        plan, counts=counts, sampled=plan.sampled[kept], sample_at=plan.sample_at[kept], rounds=plan.rounds[kept],
        fed=plan.fed[kept],
    )
    return plan, failed


def advance(plan: Plan, tokens: list[int], rows: RunningBatch, grammars: GrammarCompiler) -> None:
    """Tell the constraints of rows that go on which tokens they got; their masks are found beside what follows."""
    last = rows.max_new[plan.sampled] + rows.prompt[plan.sampled] - rows.known[plan.sampled] == 1
    for slot, token, is_last in zip(plan.sampled.tolist(), tokens, last.tolist(), strict=True):
        if constraint := rows.constraints.get(slot):
            grammars.advance(constraint, token, is_last)
