"""The embedded model over 2 and 3 ranks: the same ids as transformers, and prompt log probabilities as of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.v1 import generation_pb2 as pb
from tests.e2e.reference_runs import Rows, answers, check
from tests.processes import ShardGroup, ShardProcess

TOGETHER, ALONE = 32, 12  # tokens, to save time


@pytest.fixture(scope="module", params=[2, 3])
def group(request: pytest.FixtureRequest, shard_group: Callable[..., ShardGroup], embedded_model: Path) -> ShardGroup:
    return shard_group(embedded_model, request.param, "--dtype", "float32")


def shortened(rows: Rows, tokens: int) -> Rows:
    return [{**row, "output_ids": row["output_ids"][:tokens]} for row in rows]


def test_all_prompts_as_one_batch(group: ShardGroup, reference: Rows) -> None:
    rows = shortened(reference, TOGETHER)
    check(rows, answers(group.ranks[0], rows))


def test_three_alone_through_the_last_rank(group: ShardGroup, reference: Rows) -> None:
    for number in (3, 9, 17):
        rows = shortened([reference[number]], ALONE)
        check(rows, answers(group.ranks[-1], rows))


def scores(process: ShardProcess, text: str) -> list[float]:
    request = pb.Request(id=1, text=text, stopping=pb.Stopping(max_new_tokens=1), want=pb.Want(prompt_logprobs=True))
    steps = list(process.stub.Prefill(pb.PrefillRequest(requests=[request], owner="scores")))
    return list(steps[-1].details[0].prompt_logprobs.logprob)


def test_prompt_logprobs_are_those_of_one_rank(
    group: ShardGroup, shard: Callable[..., ShardProcess], embedded_model: Path
) -> None:
    text = "The quick brown fox jumps over the lazy dog"
    one, many = scores(shard(embedded_model, "--dtype", "float32"), text), scores(group.ranks[0], text)
    assert math.isnan(one[0])
    assert max(abs(a - b) for a, b in zip(one[1:], many[1:], strict=True)) < 1e-3
