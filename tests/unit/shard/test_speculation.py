"""Speculation: guesses are found in the row's own text, cost no token its value, and stop where they do not pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace._common.detokenizer import Detokenizer, TokenBytes
from headrace_shard.batch import RunningBatch
from headrace_shard.pace import Pace
from headrace_shard.requests import Detail, Request, Timings
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.speculation import HOPE, LOOKUP, NGRAM, PAUSE, Speculation, lookup
from tests.unit.shard.test_executor import EOS, Driver, request


def cycle(tokens: list[int]) -> int:
    """A model that repeats itself, with an exception now and then that no guess foresees."""
    return 40 if len(tokens) % 13 == 0 else 3 + (tokens[-1] * 3 + len(tokens) % 13) % 7


def continued(says: Callable[[list[int]], int], prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(says(tokens))
    return tokens[len(prompt) :]


def serve(d: Driver, *requests: Request) -> tuple[dict[int, list[int]], list[Detail]]:
    first, rest = d.prefill(*requests), d.decode(1)
    d.run()
    return d.tokens(first, rest), [x for c in (first, rest) for s in d.out[c] for x in s.details]


@pytest.mark.parametrize(
    ("tokens", "most", "found"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 1, [8]),  # the latest
        ([1, 2, 3, 9, 7, 6, 1, 2, 3, 1, 2, 3], 5, [9, 7, 6, 1, 2]),  # the latest that says enough
        ([1, 1, 1, 1], 4, [1]),
        ([1, 2, 3, 4], 4, []),
        ([1, 2, 3], 4, []),
        ([7, 2, 3, 4, 1, 2, 3], 4, []),  # two tokens alike are not enough
    ],
)
def test_lookup(tokens: list[int], most: int, found: list[int]) -> None:
    assert lookup(np.array(tokens, dtype=np.int32), most).tolist() == found


def test_several_tokens_leave_in_one_step_and_are_those_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    d = Driver(speculate=4, step_tokens=64)
    d.model.says = cycle
    monkeypatch.setattr(d.executor._scheduler.pace, "draft_price", lambda: 0.1)
    tokens, _ = serve(d, request(1, [5, 6, 7], 90))
    assert tokens[1] == continued(cycle, [5, 6, 7], 90)
    assert len(d.model.sizes) < 60
    assert d.blocks.free == 40


def test_details_of_one_step_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {i: bytes([97 + i % 26]) for i in range(50)}
    d = Driver(speculate=4, step_tokens=64)
    d.model.says = cycle
    monkeypatch.setattr(d.executor._scheduler.pace, "draft_price", lambda: 0.1)
    detokenizer = Detokenizer(cast(TokenBytes, table.__getitem__), frozenset())
    tokens, details = serve(d, request(1, [5, 6, 7], 60, top_n=2, detokenizer=detokenizer))
    assert sum(len(x.top) for x in details) == 60
    assert [t for x in details for t in x.tokens] == tokens[1] == [ids[0] for x in details for ids, _ in x.top]
    assert max(len(x.tokens) for x in details) > 1
    assert [x.generated_tokens for x in details] == np.cumsum([len(x.tokens) for x in details]).tolist()


def test_an_end_among_right_guesses_ends_the_request_there() -> None:
    def says(tokens: list[int]) -> int:
        return EOS if len(tokens) == 40 else 3 + len(tokens) % 4

    d = Driver(speculate=8, step_tokens=64)
    d.model.says = says
    tokens, details = serve(d, request(1, [3], 100), request(2, [3], 30), request(3, [3], 100, ignore_eos=True))
    assert tokens == {1: continued(says, [3], 40), 2: continued(says, [3], 30), 3: continued(says, [3], 100)}
    assert {x.request_id: x.generated_tokens for x in details if x.finish_reason} == {1: 40, 2: 30, 3: 100}


def propose(speculation: Speculation, pace: Pace, *slots: int) -> list[int]:
    """How many draft tokens each of the rows gets beside the others, with all the room that it wants."""
    speculation.begin()
    counts = speculation.propose(np.array(slots), 64, lambda slot, tokens: True, pace)
    return [counts.get(slot, 0) for slot in slots]


def test_guesses_that_do_not_pay_stop_and_are_tried_again_later() -> None:
    rows = RunningBatch(2, 512)
    slot = rows.add(request(1, [5, 6, 7, 8] * 20, 300), 1)
    speculation, pace = Speculation(rows, 4), Pace()
    pace.learn(Timings(total=0.010, decode_tokens=1))
    pace.learn(Timings(total=0.014, decode_tokens=1, draft_tokens=1))
    assert pace.draft_price() == pytest.approx(0.4)
    assert propose(speculation, pace, slot) == [2]  # 0.7 and 0.49 are above 0.4
    other = rows.add(request(2, [5, 6, 7, 8] * 20, 300), 1)
    assert propose(speculation, pace, slot, other) == [0, 0]  # beside another row a guess costs the double
    for _ in range(30):
        speculation.learn(slot, 1, 0)
    assert propose(speculation, pace, slot) == [0]
    rows.known[slot] += PAUSE
    rows.tokens[slot, : rows.known[slot]] = ([5, 6, 7, 8] * 100)[: rows.known[slot]]
    assert propose(speculation, pace, slot) == [1]
    assert propose(speculation, pace, other) == [2]  # each request has its own record
    assert HOPE > 0.4
    assert NGRAM <= 4


def test_a_wrong_guess_says_nothing_about_those_behind_it() -> None:
    rows = RunningBatch(1, 128)
    slot = rows.add(request(1, [5, 6, 7, 8] * 20, 40), 1)
    speculation, pace = Speculation(rows, 8), Pace()
    propose(speculation, pace, slot)
    speculation.learn(slot, 8, 0)
    assert speculation._rate[LOOKUP, slot] == pytest.approx(HOPE * 0.9)
    speculation.learn(slot, 2, 2)
    assert speculation._rate[LOOKUP, slot] == pytest.approx(1 - (1 - HOPE * 0.9) * 0.81)


JOBS = st.lists(
    st.tuples(st.lists(st.integers(3, 6), min_size=1, max_size=30), st.integers(1, 60), st.integers(0, 3)),
    min_size=1, max_size=6,
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(JOBS, st.integers(1, 6), st.integers(2, 40), st.booleans())
def test_no_token_depends_on_speculation(
    jobs: list[tuple[list[int], int, int]], speculate: int, step_tokens: int, caching: bool
) -> None:
    """Greedy and sampled, with penalties and minimum length, in company, with and without the prefix cache."""
    def build() -> list[Request]:
        kinds = [
            SamplingParams(), SamplingParams(sampled=True, temperature=4.0, seed=7),
            SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5),
            SamplingParams(sampled=True, temperature=6.0, top_k=20, seed=9, presence_penalty=1.0),
        ]
        return [request(i, prompt, n, params=kinds[kind], min_new=n // 2) for i, (prompt, n, kind) in enumerate(jobs, 1)]

    seen = []
    for most in (0, speculate):
        d = Driver(blocks=80, speculate=most, step_tokens=step_tokens)
        d.executor._prefix._enabled = caching
        d.model.says = cycle
        seen.append(serve(d, *build())[0])
        assert d.blocks.free == 80
        assert d.rows.free == 8
    assert seen[0] == seen[1]
