"""Prompts of an exact length, and answers that do not count."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.workloads import LONG_PROMPT, MANY, ONE, SHORT_PROMPT, WORKLOADS, Invalid, Workload, check, rates
from headrace._common.tokenizing import Tokenizer
from headrace_launcher.bench.events import Answer
from headrace_launcher.bench.load import Outcome, Sent
from tests.models import write_tiny_model

GOOD = Answer([1.0, 2.0, 3.0], "abc", prompt_tokens=5, completion_tokens=3)
WORK = Workload("work", 1, 5, 3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tiny_model(Path(tmp_path_factory.mktemp("model"))) / "tokenizer.json")


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_prompts_have_exactly_their_length(workload: Workload, tokenizer: Tokenizer) -> None:
    prompts = workload.prompts(tokenizer, "0")
    assert len(prompts) == workload.requests
    assert {len(prompt) for prompt in prompts} == {workload.input_tokens}


def test_no_two_prompts_begin_alike(tokenizer: Tokenizer) -> None:
    every = [tuple(prompt[:32]) for label in "01" for work in WORKLOADS for prompt in work.prompts(tokenizer, label)]
    assert len(set(every)) == len(every)
    assert MANY.prompts(tokenizer, "0") == MANY.prompts(tokenizer, "0")


def test_an_answer_of_the_right_length_counts() -> None:
    check(WORK, [GOOD, GOOD])


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Answer([1.0], "a", prompt_tokens=5, completion_tokens=2), "2 tokens instead of 3"),
        (Answer([1.0], "a", prompt_tokens=5, completion_tokens=None), "None tokens instead of 3"),
        (Answer([1.0], "a", prompt_tokens=6, completion_tokens=3), "counted as 6"),
        (Answer([1.0], "a", prompt_tokens=None, completion_tokens=3), "counted as None"),
        (Answer(error="status 500: no"), "status 500"),
        (Answer(error="no output", prompt_tokens=5, completion_tokens=3), "no output"),
    ],
)
def test_answers_that_do_not_count(answer: Answer, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        check(WORK, [GOOD, answer])


def test_a_single_token_may_have_no_text() -> None:
    check(Workload("one", 1, 5, 1), [Answer(error="no output", prompt_tokens=5, completion_tokens=1)])


def test_rates() -> None:
    outcome = Outcome(4.0, [Sent(0.0, 3.0)], [GOOD])
    found = rates(WORK, outcome)
    assert (found.output, found.decode, found.prefill) == (0.75, 1.0, None)
    short = Outcome(2.0, [Sent(0.0, 0.5), Sent(0.5, 1.5), Sent(1.5, 2.0)], [Answer([1.0], "a", 128, 1)] * 3)
    found = rates(SHORT_PROMPT, short)
    assert (found.output, found.decode, found.prefill) == (1.5, None, 256.0)


def test_a_quick_workload_is_a_smaller_one() -> None:
    assert (ONE.quick().output_tokens, ONE.quick().input_tokens) == (32, 128)
    assert (SHORT_PROMPT.quick().repeats, LONG_PROMPT.quick()) == (1, LONG_PROMPT)
