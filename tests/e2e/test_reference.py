"""The embedded model through a real shard: greedy text equals transformers', whatever the batch and the chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.v1 import generation_pb2 as pb
from tests.e2e.reference_runs import TIE, Rows, answers, check
from tests.processes import ShardProcess


@pytest.fixture(scope="module")
def process(shard: Callable[..., ShardProcess], embedded_model: Path) -> ShardProcess:
    return shard(embedded_model, "--dtype", "float32")


def test_all_prompts_as_one_batch(process: ShardProcess, reference: Rows) -> None:
    check(reference, answers(process, reference))


@pytest.mark.parametrize("number", [0, 7, 16])
def test_three_alone(process: ShardProcess, reference: Rows, number: int) -> None:
    check([reference[number]], answers(process, [reference[number]]))


def test_three_in_small_chunks(process: ShardProcess, reference: Rows) -> None:
    rows = [reference[i] for i in (1, 11, 15)]
    check(rows, answers(process, rows, max_step_tokens=7))


def test_with_its_own_4_bits_as_draft(shard: Callable[..., ShardProcess], embedded_model: Path, reference: Rows) -> None:
    process = shard(embedded_model, "--dtype", "float32", "--draft-model-folder", str(embedded_model))
    timings: list[pb.Timings] = []
    for row in (reference[0], reference[7]):
        check([row], answers(process, [row], timings=timings))
    assert sum(t.model_accepted_tokens for t in timings) > 0.5 * sum(t.model_draft_tokens for t in timings) > 10


def test_the_stored_reference_is_what_transformers_says(embedded_model: Path, reference: Rows) -> None:
    """Three prompts are computed anew, teacher-forced: at every place the best token is the stored one, or tied with it."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(embedded_model, gguf_file="model.gguf", dtype=torch.float32)
    for row in (reference[2], reference[11], reference[17]):
        with torch.inference_mode():
            logits = model(torch.tensor([row["input_ids"] + row["output_ids"]])).logits[0, len(row["input_ids"]) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(row["output_ids"])[:, None])[:, 0]
        assert bool((logits.max(-1).values - chosen <= TIE).all())
