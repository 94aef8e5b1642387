"""The draft model: its cache keeps in step with every row, its guesses cost no text anything, and it stops where it does
not pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_shard.draft import DraftModel, fit
from headrace_shard.requests import Request
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.speculation import BACK_OFF, HOPE, MODEL, PAUSE
from headrace_shard.step import StepInput
from tests.unit.shard.test_executor import EOS, VOCAB, Driver, MemoryModel, expected, follows, request

Says = Callable[[list[int]], int]
SAMPLED = SamplingParams(sampled=True, temperature=5.0, seed=3)


def mostly(tokens: list[int]) -> int:
    """What `follows` says, but wrong after each seventh token."""
    return 47 if len(tokens) % 7 == 0 else follows(tokens)


class Small(MemoryModel):
    """A draft model that refuses to look at what it has not written, and keeps what it has looked at."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.seen: list[list[int]] = []

    def contexts(self, step: StepInput) -> dict[int, list[int]]:
        contexts = super().contexts(step)
        self.seen += [contexts[row] for row in step.logit_rows.tolist()]
        assert all(token >= 0 for tokens in contexts.values() for token in tokens)
        return contexts


class Pair(Driver):
    """A driver whose executor has a draft model; passes of it cost nothing, or `price` of a step."""

    def __init__(
        self, says: Says = follows, price: float = 0.01, draft_blocks: int = 40, window: int = 128, **more: Any
    ) -> None:
        self.small = Small(draft_blocks)
        self.small.says = says  # type: ignore[assignment]
        super().__init__(speculate=4, draft=DraftModel(self.small, window, draft_blocks), **{"step_tokens": 64, **more})
        pace = self.executor._scheduler.pace
        pace.draft_price = lambda: 0.01  # type: ignore[method-assign]
        pace.round_price = lambda: price  # type: ignore[method-assign]
        pace.catch_up_price = lambda: price / 8  # type: ignore[method-assign]
        self.speculation, self.batches = self.executor._speculation, 0

    def serve(self, *requests: Request) -> dict[int, list[int]]:
        self.batches += 1
        first, rest = self.prefill(*requests), self.decode(self.batches)
        self.run()
        results = [step for call in (first, rest) for step in self.out[call]]
        self.proposed = sum(step.timings.model_draft_tokens for step in results)
        self.right = sum(step.timings.model_accepted_tokens for step in results)
        self.preempted = [number for step in results for number in step.preempted]
        self.details = [detail for step in results for detail in step.details]
        drafter = self.speculation._drafter
        assert drafter is None or drafter.blocks.free == drafter.blocks.blocks
        assert self.blocks.free == self.blocks.blocks
        return self.tokens(first, rest)


def test_a_draft_of_the_same_mind_is_always_right() -> None:
    d = Pair()
    assert d.serve(request(1, [5, 6, 7], 101)) == {1: expected([5, 6, 7], 101)}
    assert d.right == d.proposed == 80
    assert (d.details[-1].draft_tokens, d.details[-1].accepted_tokens) == (80, 80)
    assert len(d.model.sizes) == 21  # the prompt, and 5 tokens a step
    assert d.small.sizes == [4, 1, 1, 1] + 19 * [2, 1, 1, 1]  # the last guess and the token behind it, then one by one


def test_wrong_guesses_are_forgotten() -> None:
    """Guesses are wrong where they must be and nowhere else: a cache that kept one would say something else behind it."""
    d = Pair(mostly)
    assert d.serve(request(1, [5], 100)) == {1: expected([5], 100)}
    assert d.right > 60
    wrong = [len(tokens) for tokens in d.small.seen if mostly(tokens) != follows(tokens)]
    assert d.proposed - d.right >= len(wrong) > 5
    assert (d.details[-1].draft_tokens, d.details[-1].accepted_tokens) == (d.proposed, d.right)


def test_a_draft_that_is_no_good_is_left_alone() -> None:
    d = Pair(lambda tokens: 48, price=0.3)
    assert d.serve(request(1, [5], 120)) == {1: expected([5], 120)}
    passes = len(d.small.sizes)
    assert passes < 16
    assert d.right == 0
    for number in range(2, 32):
        d.serve(request(number, [number], 40))
    before = len(d.small.sizes)
    for number in range(32, 48):
        d.serve(request(number, [number], 40))
    assert 0 < len(d.small.sizes) - before <= passes  # one of 16 requests tries


def test_a_request_that_stopped_tries_again_after_a_while() -> None:
    def late(tokens: list[int]) -> int:
        return 48 if len(tokens) < 30 else follows(tokens)

    d = Pair(late, price=0.3)
    assert d.serve(request(1, [5], 126)) == {1: expected([5], 126)}
    assert d.right > 15
    assert PAUSE < 100
    assert BACK_OFF > 1


def test_passes_are_worth_it_only_for_enough_rows() -> None:
    d = Pair(price=0.3)
    d.executor._scheduler.pace.draft_price = lambda: 0.0  # type: ignore[method-assign]
    jobs = [request(i, [10 + i], 60, params=SAMPLED if i > 1 else SamplingParams()) for i in (1, 2, 3, 4)]
    first = d.prefill(*jobs)
    d.run()
    d.speculation._welcome(0)
    for slot in range(4):
        d.speculation._welcome(slot)
        d.speculation._rate[MODEL, slot] = HOPE if slot == 0 else 0.1
    slots = np.arange(4)
    d.speculation.begin()
    assert d.speculation.propose(slots, 64, d.executor._scheduler._grow, d.executor._scheduler.pace) == {}
    d.speculation._rate[MODEL, :] = HOPE
    counts = d.speculation.propose(slots, 64, d.executor._scheduler._grow, d.executor._scheduler.pace)
    assert set(counts) == {0, 1, 2, 3}
    d.executor.clear(d.batch_id(first), "")
    d.run()


def test_catching_up_is_bounded_where_others_wait_and_must_pay() -> None:
    d = Pair(price=0.1, blocks=80)
    d.executor._scheduler.pace.catch_up_price = lambda: 0.05  # type: ignore[method-assign]
    d.prefill(request(1, [5] * 60, 68), request(2, [6] * 60, 68))
    d.decode(1)
    d.turn(9)
    assert d.rows.free == 6
    assert 1 < max(d.small.sizes) <= 20
    d = Pair(price=0.4)
    d.serve(request(1, [5] * 110, 10))  # 5.5 steps for a part of ten
    assert d.small.sizes == []


def test_the_window_of_the_draft_model_holds() -> None:
    d = Pair(window=50)
    assert d.serve(request(1, [5], 120)) == {1: expected([5], 120)}
    assert d.small.cache.max() > 0
    assert 40 - 8 < d.right <= 49


def test_rows_take_turns_where_its_cache_is_small() -> None:
    d = Pair(draft_blocks=8, blocks=80)
    jobs = [request(i, [i] * 20, 90) for i in (3, 4, 5)]
    assert d.serve(*jobs) == {i: expected([i] * 20, 90) for i in (3, 4, 5)}
    assert d.right > 40


def test_a_preempted_request_is_taken_in_again() -> None:
    d = Pair(blocks=12)
    tokens = d.serve(request(1, [5], 110), request(2, [6], 110))
    assert d.preempted == [2]
    assert tokens[1] == expected([5], 110)
    said = tokens[2]
    again = Request(2, np.array([6, *said], dtype=np.int32), len(said), 110)
    assert said + d.serve(again)[2] == expected([6], 110)
    assert d.right == d.proposed > 4


def test_its_end_token_is_its_last() -> None:
    def says(tokens: list[int]) -> int:
        return EOS if len(tokens) == 28 else follows(tokens)

    d = Pair(says)
    d.model.says = says
    d.serve(request(1, [5], 100))
    assert d.proposed == d.right + 1 == 22  # five steps of four, one, and the end, behind which nothing counts
    assert d.details[-1].generated_tokens == 28


def test_a_failing_draft_model_costs_nothing_but_its_guesses() -> None:
    d = Pair()
    d.small.fails = True
    assert d.serve(request(1, [5], 40)) == {1: expected([5], 40)}
    assert d.speculation._drafter is None
    assert d.proposed == 0


def test_logits_fit_a_vocabulary_of_another_size() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit(logits, 2).tolist() == [[1.0, 2.0]]
    assert fit(logits, 5).argmax().item() == 2
    assert fit(logits, 5).shape == (1, 5)
    assert bool(fit(logits, 5).isfinite().all())


class Mixed(MemoryModel):
    """Logits that depend on the last token alone: a Markov chain, of which the draft model has another one."""

    def __init__(self, blocks: int, seed: int) -> None:
        super().__init__(blocks)
        self.table = torch.from_numpy(np.random.default_rng(seed).normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32))
        self.table[:, EOS] = -30.0

    def forward(self, step: StepInput) -> torch.Tensor:
        contexts = self.contexts(step)
        return self.table[[contexts[row][-1] for row in step.logit_rows.tolist()]]


def test_sampled_text_keeps_its_distribution() -> None:
    """The third token of 3,000 requests, as often as the chain says (chi-squared); guesses are near, but often wrong."""
    count, hot = 3000, SamplingParams(sampled=True, temperature=1.3)
    d = Pair(blocks=600, rows=256, step_tokens=4096, draft_blocks=600)
    d.model = d.executor._runner = Mixed(600, 1)
    d.speculation._drafter._model = small = Mixed(600, 1)  # type: ignore[union-attr]
    d.executor._scheduler.pace.draft_price = lambda: 0.0  # type: ignore[method-assign]
    small.table = d.model.table + 0.7 * Mixed(1, 2).table
    jobs = [request(i, [5], 5, params=replace(hot, seed=i)) for i in range(1, count + 1)]
    seen: Counter[int] = Counter()
    proposed = right = 0
    for at in range(0, count, 250):
        first = d.prefill(*jobs[at : at + 250])
        d.run()
        rest = d.decode(d.batch_id(first))
        d.run()
        seen.update(tokens[2] for tokens in d.tokens(first, rest).values())
        timings = [step.timings for call in (first, rest) for step in d.out[call]]
        proposed += sum(t.model_draft_tokens for t in timings)
        right += sum(t.model_accepted_tokens for t in timings)
    assert 0.2 < right / proposed < 0.9
    chain = (d.model.table / hot.temperature).softmax(-1).double().numpy()
    wanted = np.linalg.matrix_power(chain, 3)[5] * count
    common = wanted >= 5
    observed = np.array([seen[i] for i in range(VOCAB)], dtype=float)
    observed, wanted = np.append(observed[common], observed[~common].sum()), np.append(wanted[common], wanted[~common].sum())
    chi = float(((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum())
    freedom = len(wanted) - 1
    assert chi < freedom + 4 * np.sqrt(2 * freedom), (chi, freedom)


JOBS = st.lists(
    st.tuples(st.lists(st.integers(3, 6), min_size=1, max_size=30), st.integers(1, 60), st.integers(0, 3)),
    min_size=1, max_size=6,
)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(JOBS, st.sampled_from([follows, mostly]), st.integers(2, 40), st.integers(2, 20))
def test_no_token_depends_on_the_draft_model(
    jobs: list[tuple[list[int], int, int]], says: Says, step_tokens: int, draft_blocks: int
) -> None:
    """Greedy and sampled, with penalties and minimum length, in company, with little room for the draft model."""
    kinds = [
        SamplingParams(), SamplingParams(sampled=True, temperature=4.0, seed=7),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5),
        SamplingParams(sampled=True, temperature=6.0, top_k=20, seed=9, presence_penalty=1.0),
    ]

    def build() -> list[Request]:
        return [request(i, prompt, n, params=kinds[kind], min_new=n // 2) for i, (prompt, n, kind) in enumerate(jobs, 1)]

    plain = Driver(blocks=80, step_tokens=step_tokens)
    first, rest = plain.prefill(*build()), plain.decode(1)
    plain.run()
    d = Pair(says, blocks=80, step_tokens=step_tokens, draft_blocks=draft_blocks)
    assert d.serve(*build()) == plain.tokens(first, rest)
