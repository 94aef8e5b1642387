"""Constrained requests of a client that speaks to a shard directly."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace._common.intermediate import read_step
from headrace.v1 import generation_pb2 as pb
from tests.processes import ShardProcess

PAIR = '{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}'


@pytest.fixture(scope="module")
def one(shard: Callable[..., ShardProcess], tiny_model: Path) -> ShardProcess:
    return shard(tiny_model, "--max-step-tokens", "64", "--max-batch-size", "8", "--batch-lease", "2")


def ask(number: int, grammar: pb.Grammar | None, **more: Any) -> pb.Request:
    given = {"stopping": pb.Stopping(max_new_tokens=40), "sampling": pb.Sampling(temperature=1.0, seed=number), **more}
    return pb.Request(id=number, text="Hello", grammar=grammar, return_text=True, **given)


def run(process: ShardProcess, *requests: pb.Request) -> tuple[dict[int, str], dict[int, pb.Detail]]:
    """(text, last detail) of each request."""
    steps = list(process.stub.Prefill(pb.PrefillRequest(requests=requests), timeout=60))
    if steps[-1].running:
        steps += process.stub.Decode(pb.DecodeRequest(batch_ids=[steps[0].batch_id]), timeout=60)
    details = [detail for step in steps for detail in step.details]
    texts = {r.id: "".join(d.text for d in details if d.request_id == r.id) for r in requests}
    assert all(token.request_id in texts for step in steps for token in read_step(step))
    return texts, {d.request_id: d for d in details if d.is_end}


def test_each_row_keeps_to_its_own_grammar(one: ShardProcess) -> None:
    assert "grammar" in one.stub.Info(pb.InfoRequest()).features
    texts, ends = run(
        one, ask(1, pb.Grammar(type="regex", value="[0-9]{4}-[0-9]{2}")), ask(2, None),
        ask(3, pb.Grammar(type="choice", value='["left", "right"]')),
        ask(4, pb.Grammar(type="json_schema", value=PAIR)),
        ask(5, pb.Grammar(type="regex", value="ab?c"), stopping=pb.Stopping(max_new_tokens=9, min_new_tokens=8)),
    )
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", texts[1])
    assert texts[3] in ("left", "right")
    assert re.fullmatch(r"\[\s*(true|false)\s*,\s*(true|false)\s*\]", texts[4]) or ends[4].finish_reason == pb.Detail.LENGTH
    assert texts[5] in ("ac", "abc")
    assert [ends[n].finish_reason for n in (1, 3, 5)] == [pb.Detail.EOS_TOKEN] * 3


def test_a_bad_grammar_ends_alone(one: ShardProcess) -> None:
    texts, ends = run(one, ask(1, pb.Grammar(type="json_schema", value='{"uniqueItems": true}')), ask(2, None))
    assert (ends[1].finish_reason, texts[1]) == (pb.Detail.ERROR, "")
    assert "uniqueItems" in ends[1].message
    assert ends[2].finish_reason in (pb.Detail.LENGTH, pb.Detail.EOS_TOKEN)
