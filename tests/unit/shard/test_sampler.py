"""Filters against definitions by sorting, penalties against their formulas, draws against their distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_shard.kernels.build import BuildFailed
from headrace_shard.kernels.library import Library
from headrace_shard.sampling.bits import add, discard, has, none_of, tokens_of
from headrace_shard.sampling.filters import CANDIDATES, Filters, best, decided_by_candidates, kept
from headrace_shard.sampling.params import SamplingParams, Watermark
from headrace_shard.sampling.passes import Passes, TorchPasses
from headrace_shard.sampling.penalties import process
from headrace_shard.sampling.sampler import Row, choose

NONE = np.zeros(0, dtype=np.int32)


def compiled() -> list[Passes]:
    """The kernels' passes; none without a compiler, where they do not serve either."""
    try:
        return [Library()]
    except BuildFailed:
        return []


PASSES: list[Passes] = [TorchPasses(), *compiled()]
NAMES = [type(passes).__name__ for passes in PASSES]


def filters(rows: int, top_k: float = 0, top_p: float = 1, typical_p: float = 1, min_p: float = 0) -> Filters:
    return Filters(*(torch.full((rows, 1), float(x)) for x in (top_k, top_p, typical_p, min_p)))


def by_sorting(logits: torch.Tensor, top_k: int, top_p: float, typical_p: float, min_p: float) -> set[int]:
    """What the filters keep, by definition, one after the other, in float64."""
    x = logits.double()
    if top_k:
        x = torch.where(x >= x.sort(descending=True).values[min(top_k, len(x)) - 1], x, -torch.inf)
    if top_p < 1:
        values, order = x.sort(descending=True)
        p = values.softmax(-1)
        x = x.index_fill(0, order[(p.cumsum(-1) - p) >= top_p], -torch.inf)
    if min_p:
        p = x.softmax(-1)
        x = torch.where(p >= min_p * p.max(), x, -torch.inf)
    if typical_p < 1:
        p = x.softmax(-1)
        surprise = -p.log()
        distance = (surprise - (p * surprise.nan_to_num(posinf=0)).sum()).abs()
        order = distance.argsort()
        mass = p[order]
        x = x.index_fill(0, order[(mass.cumsum(-1) - mass) >= typical_p], -torch.inf)
    return set((x > -torch.inf).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("passes", PASSES, ids=NAMES)
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6), top_k=st.sampled_from([0, 1, 5, 100, 200, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]), typical_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1, 0.01]), spread=st.sampled_from([0.5, 2.0, 6.0]),
)
@example(seed=0, top_k=200, top_p=0.5, typical_p=1.0, min_p=0.01, spread=2.0)
def test_filters_keep_what_their_definitions_keep(
    seed: int, top_k: int, top_p: float, typical_p: float, min_p: float, spread: float, passes: Passes
) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(seed)) * spread
    total = logits.logsumexp(-1, keepdim=True)
    what = filters(3, top_k if top_k < 1000 else 0, top_p, typical_p, min_p)
    keep = kept(logits, total, what, passes)
    for row in range(3):
        exact = by_sorting(logits[row], top_k, top_p, typical_p, min_p)
        # float32 against float64: the token at a mass's very edge may fall on either side of it.
        assert len(set(keep[row].nonzero()[:, 0].tolist()) ^ exact) <= 2
    values, ids = best(logits)
    among = kept(values, total, what, passes)
    decided = decided_by_candidates(values, total, what)
    for row in decided.nonzero()[:, 0].tolist():
        assert set(ids[row][among[row]].tolist()) == set(keep[row].nonzero()[:, 0].tolist())


@pytest.mark.parametrize("vocab", [10, 128, 300, 8192 + 64, 16384 + 5])
def test_the_two_stage_selection_is_exact(vocab: int) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    values, ids = best(logits)
    assert torch.equal(values, logits.sort(descending=True).values[:, :CANDIDATES])
    assert torch.equal(logits.gather(1, ids), values)


def row(index: int = 0, top_n: int = 0, output: Any = NONE, **params: Any) -> Row:
    return Row(SamplingParams(**params), NONE, output, index, (), top_n)


@pytest.mark.parametrize("passes", PASSES, ids=NAMES)
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 2.0, "top_p": 0.9}, {"typical_p": 0.6}, {"min_p": 0.2}]
)
def test_draws_follow_the_filtered_distribution(params: dict[str, Any], passes: Passes) -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(3)) * 2
    allowed = by_sorting(
        logits / params.get("temperature", 1), int(params.get("top_k", 0)), params.get("top_p", 1),
        params.get("typical_p", 1), params.get("min_p", 0),
    )
    expected = torch.full((200,), -torch.inf)
    expected[sorted(allowed)] = logits[sorted(allowed)] / params.get("temperature", 1)
    expected = expected.softmax(-1)
    count = 20000
    drawn: list[int] = []
    for start in range(0, count, 500):
        rows = [row(sampled=True, seed=start + i, **params) for i in range(500)]
        drawn += choose(logits.expand(500, -1), rows, passes).tokens.tolist()
    counts = np.bincount(drawn, minlength=200)
    assert set(np.nonzero(counts)[0]) <= allowed
    common = expected.numpy() * count > 20
    chi = ((counts - expected.numpy() * count)[common] ** 2 / (expected.numpy() * count)[common]).sum()
    degrees = max(1, int(common.sum()) - 1)
    assert chi < degrees + 5 * math.sqrt(2 * degrees)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("passes", PASSES, ids=NAMES)
def test_a_row_draws_the_same_alone_and_in_company(seed: int, passes: Passes) -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(seed)) * 3
    kinds: list[dict[str, Any]] = [
        {}, {"sampled": True}, {"sampled": True, "top_p": 0.9}, {"sampled": True, "top_k": 20, "top_p": 0.5},
        {"sampled": True, "typical_p": 0.8, "frequency_penalty": 1.0},
    ]
    rows = [row(index=i, seed=seed + i, output=np.array([1, 2, 2], dtype=np.int32), **k) for i, k in enumerate(kinds)]
    together = choose(logits, rows, passes).tokens.tolist()
    assert together == [int(choose(logits[i : i + 1], [r], passes).tokens[0]) for i, r in enumerate(rows)]


@pytest.mark.parametrize("passes", PASSES, ids=NAMES)
def test_logprobs_and_top_tokens_are_of_the_raw_distribution(passes: Passes) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    choice = choose(logits, [row(logit_bias={7: 100.0}, top_n=3), row()], passes)
    assert choice.tokens[0] == 7
    assert choice.logprobs[0] == pytest.approx(float(expected[0, 7]), abs=1e-5)
    ids, logprobs = choice.top[0]
    assert ids == expected[0].topk(3).indices.tolist()
    assert logprobs == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-5)
    assert 1 not in choice.top


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("passes", PASSES, ids=NAMES)
def test_a_mask_holds_its_row_alone_and_leaves_logprobs_as_they_are(passes: Passes, sampled: bool) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    expected, free = logits.log_softmax(-1), int(logits[1].argmax())
    allowed = none_of(2)  # fewer words than the logits need: the last tokens are not among them
    for token in (5, 40, 63):
        add(allowed, token)
    discard(allowed, 63)
    discard(allowed, 99)
    assert (tokens_of(allowed).tolist(), has(allowed, 40), has(allowed, 99)) == ([5, 40], True, False)
    params = SamplingParams(sampled=sampled, temperature=2.0)
    rows = [Row(params, NONE, NONE, 0, (), 2, allowed), row(), Row(params, NONE, NONE, 1, (), 0, allowed)]
    choice = choose(logits, rows, passes)
    assert {int(choice.tokens[0]), int(choice.tokens[2])} <= {5, 40}
    assert choice.tokens[1] == free
    assert choice.logprobs == pytest.approx([float(expected[i, token]) for i, token in enumerate(choice.tokens)], abs=1e-5)
    assert choice.top[0][0] == expected[0].topk(2).indices.tolist()


@pytest.mark.parametrize("passes", PASSES, ids=NAMES)
def test_a_row_of_nan_fails_alone(passes: Passes) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    clean = choose(logits, [row()] * 3, passes)
    broken = logits.clone()
    broken[1, 4] = torch.nan
    choice = choose(broken, [row(), row(sampled=True), row()], passes)
    assert choice.failed.tolist() == [False, True, False]
    assert choice.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


def test_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5, 3.0])
    prompt, output = np.array([0, 1], dtype=np.int32), np.array([2, 2, 3], dtype=np.int32)
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={4: -1.0})
    process(logits, params, prompt, output, [3])
    # seen tokens: positive ones halved, negative ones doubled; then 0.5 a use and 0.25 once, over the output
    assert logits.tolist() == [1.0, -4.0, 0.5 - 2 * 0.5 - 0.25, -math.inf, 2.0]


def test_a_watermark_prefers_half_of_the_vocabulary_by_the_last_token() -> None:
    def process_one(prompt: list[int], output: list[int]) -> torch.Tensor:
        logits = torch.zeros(1000)
        params = SamplingParams(watermark=Watermark())
        process(logits, params, np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32), [])
        return logits

    marked = process_one([5, 7], [])
    assert sorted(marked.tolist()) == [0.0] * 500 + [2.0] * 500
    assert torch.equal(process_one([1], [3, 7]), marked)
    assert not torch.equal(process_one([5, 8], []), marked)
    # the green list of TGI and of the authors' own code: the key times the last token seeds torch's permutation
    expected = torch.randperm(1000, generator=torch.Generator().manual_seed(15485863 * 7))[:500]
    assert bool((marked[expected] == 2.0).all())
