"""What constraints mean for one step: which of its rows can get a token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace_shard.batch import RunningBatch
from headrace_shard.grammar.compiler import PATIENCE, GrammarCompiler
from headrace_shard.grammar.state import Constraint
from headrace_shard.scheduler import Plan


def settle(plan: Plan, constraints: dict[int, Constraint], grammars: GrammarCompiler) -> tuple[Plan, dict[int, str]]:
    """The plan without the rows that cannot get a token, and without places behind draft tokens that the grammar forbids;
    and why some of the rows (slots) never will get one.

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
        elif constraint.knows(int(plan.rounds[at])):
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


def advance(known: dict[int, int], rows: RunningBatch, grammars: GrammarCompiler) -> None:
    """Tell the constraints of rows that go on which tokens they got; their masks are found beside what follows.

    `known`: tokens that each constrained row had before.
    """
    for slot, constraint in rows.constraints.items():
        if len(got := rows.tokens[slot, known[slot] : rows.known[slot]]):
            grammars.advance(constraint, got.tolist(), rows.tokens_left(slot) == 1)
