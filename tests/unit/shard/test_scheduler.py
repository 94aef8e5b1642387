"""What the scheduler puts into a step: generated tokens first, then prompts, and never both in one chunk."""

from __future__ import annotations

import numpy as np
import pytest

from headrace_shard.kv.blocks import BLOCK_SIZE
from headrace_shard.pace import Pace
from headrace_shard.requests import Request, Timings
from headrace_shard.step import StepInput
from tests.unit.shard.test_executor import Driver, expected, request

PROMPT = list(range(3, 23))  # 20 tokens


def resumed(number: int, prompt: list[int], said: int, max_new: int) -> Request:
    """A request whose first tokens somebody else has made."""
    tokens = prompt + expected(prompt, said)
    return Request(number, np.array(tokens, dtype=np.int32), said, max_new)


def repeats(tokens: list[int]) -> int:
    return 3 + len(tokens) % 4


def watched(d: Driver) -> list[StepInput]:
    """The steps that the driver's model is going to run."""
    steps: list[StepInput] = []
    forward = d.model.forward
    d.model.forward = lambda step: (steps.append(step), forward(step))[1]  # type: ignore[method-assign, func-returns-value]
    return steps


def shapes(steps: list[StepInput]) -> list[tuple[int, list[tuple[int, int]], int]]:
    """(decode rows, (start, length) of each chunk, tokens of prompts) of each step."""
    return [(len(s.decode_lengths), [(c.start, c.length) for c in s.chunks], s.prompts) for s in steps]


def timings(d: Driver) -> list[Timings]:
    return list({step.step: step.timings for call in d.out for step in d.out[call]}.values())


def test_a_chunk_ends_where_the_prompt_does() -> None:
    d = Driver(step_tokens=64)
    steps = watched(d)
    first = d.prefill(resumed(1, PROMPT, 9, 12))
    d.run()
    rest = d.decode(1)
    d.run()
    assert d.tokens(first, rest)[1] == expected(PROMPT, 12)[9:]
    assert shapes(steps) == [(0, [(0, 20)], 20), (0, [(20, 9)], 0), (1, [], 0), (1, [], 0)]
    assert [len(s.logit_rows) for s in steps] == [0, 1, 1, 1]


def test_the_one_token_that_was_generated_is_a_decode_row() -> None:
    d = Driver(step_tokens=64)
    steps = watched(d)
    call = d.prefill(resumed(1, PROMPT, 1, 2))
    d.run()
    assert d.tokens(call)[1] == expected(PROMPT, 2)[1:]
    assert shapes(steps) == [(0, [(0, 20)], 20), (1, [], 0)]


def test_generated_tokens_come_before_those_of_prompts() -> None:
    d = Driver(step_tokens=64)
    steps = watched(d)
    calls = [d.prefill(request(1, [5], 9)), d.decode(1)]
    d.turn(2)
    calls.append(d.prefill(request(2, [6] * 8, 1, priority=1), resumed(3, PROMPT, 9, 12), request(4, [7] * 4, 1), batch=1))
    d.turn()
    calls.append(d.prefill(request(5, [8] * 8, 1, priority=1), batch=1))
    d.turn()
    assert shapes(steps)[-2:] == [(1, [(0, 8), (0, 20), (0, 4)], 32), (1, [(20, 9), (0, 8)], 8)]
    step = steps[-1]
    assert [c.offset for c in step.chunks] == [1, 10]
    assert step.positions.tolist() == [3, *range(20, 29), *range(8)]
    assert step.logit_rows.tolist() == [0, 9, 17]
    assert step.token_ids[len(step.token_ids) - step.prompts :].tolist() == [8] * 8
    calls.append(d.decode(1))
    d.run()
    got = d.tokens(*calls)
    assert got == {
        1: expected([5], 9), 2: expected([6] * 8, 1), 3: expected(PROMPT, 12)[9:], 4: expected([7] * 4, 1),
        5: expected([8] * 8, 1),
    }


@pytest.mark.parametrize("budget", [1, 3, 7, 16])
def test_chunks_end_there_whatever_the_budget(budget: int) -> None:
    d = Driver(step_tokens=budget)
    steps = watched(d)
    calls = [d.prefill(resumed(1, PROMPT, 13, 15), request(2, [6] * 9, 3)), d.decode(1)]
    d.run()
    assert d.tokens(*calls) == {1: expected(PROMPT, 15)[13:], 2: expected([6] * 9, 3)}
    for step in steps:
        of_prompts = [c for c in step.chunks if c.offset >= len(step.token_ids) - step.prompts]
        assert sum(c.length for c in of_prompts) == step.prompts
        assert step.chunks[len(step.chunks) - len(of_prompts) :] == tuple(of_prompts)
        assert not any(c.start < 20 < c.start + c.length for c in step.chunks)


def test_a_prompt_of_one_token_is_a_prompt() -> None:
    d = Driver()
    steps = watched(d)
    calls = [d.prefill(request(1, [5], 3), request(2, [6], 3, prompt_logprobs=True, prompt_top_n=2)), d.decode(1)]
    d.run()
    assert d.tokens(*calls) == {1: expected([5], 3), 2: expected([6], 3)}
    assert shapes(steps) == [(0, [(0, 1), (0, 1)], 2), (2, [], 0), (2, [], 0)]
    scores = [x.prompt_logprobs for call in calls for s in d.out[call] for x in s.details if x.prompt_logprobs]
    assert [(ids, len(values)) for ids, values in scores] == [([6], 1)]
    assert [(t.decode_tokens, t.prefill_tokens) for t in timings(d)] == [(0, 2), (2, 0), (2, 0)]


def test_the_last_token_of_a_prompt_that_was_there_is_a_prompt() -> None:
    d = Driver(step_tokens=64)
    prompt = [*PROMPT, *PROMPT][: 2 * BLOCK_SIZE + 1]
    d.prefill(request(1, prompt, 1))
    d.run()
    steps = watched(d)
    calls = [d.prefill(request(2, prompt, 2)), d.decode(2)]
    d.run()
    assert d.tokens(*calls)[2] == expected(prompt, 2)
    assert shapes(steps) == [(0, [(2 * BLOCK_SIZE, 1)], 1), (1, [], 0)]


def test_a_last_token_that_the_budget_left_over_is_a_prompt() -> None:
    d = Driver(step_tokens=19)
    d.executor._prefix._enabled = False
    steps = watched(d)
    call = d.prefill(request(1, PROMPT[:3], 2), request(2, PROMPT[:17], 1, prompt_logprobs=True))
    rest = d.decode(1)
    d.run()
    assert d.tokens(call, rest) == {1: expected(PROMPT[:3], 2), 2: expected(PROMPT[:17], 1)}
    assert shapes(steps) == [(0, [(0, 3), (0, 16)], 19), (1, [(16, 1)], 1)]
    scores = [x.prompt_logprobs for s in (*d.out[call], *d.out[rest]) for x in s.details if x.prompt_logprobs]
    assert [len(values) for _, values in scores] == [17]


def test_draft_tokens_are_generated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    d = Driver(speculate=4, step_tokens=64)
    d.model.says = repeats
    monkeypatch.setattr(d.executor._scheduler.pace, "draft_price", lambda: 0.1)
    steps = watched(d)
    d.prefill(request(1, [3], 40), request(2, [4, 5], 40))
    d.decode(1)
    d.run()
    assert max(c.length for s in steps[1:] for c in s.chunks) == 5
    assert [s.prompts for s in steps] == [3] + [0] * (len(steps) - 1)


def test_a_step_of_few_prompt_tokens_says_nothing_of_their_price() -> None:
    pace = Pace()
    pace.learn(Timings(total=0.010, decode_tokens=1))
    pace.learn(Timings(total=0.100, prefill_tokens=100))
    fitting = pace.prompt_tokens(0.060)
    pace.learn(Timings(total=0.010, prefill_tokens=1))  # a prompt of which all else was cached
    assert pace.prompt_tokens(0.060) == fitting == pytest.approx(50, abs=1)
