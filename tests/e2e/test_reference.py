"""The embedded model through a real shard: greedy text equals transformers', whatever the batch and the chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.v1 import generation_pb2 as pb
from tests.processes import ShardProcess

Rows = list[dict[str, Any]]
TIE = 1e-3  # logits this close may change places by rounding


def answers(process: ShardProcess, rows: Rows, max_step_tokens: int = 0) -> list[list[int]]:
    """Output ids of the prompts, run as one batch."""
    requests = [
        pb.Request(
            id=i + 1, token_ids=pb.TokenIds(ids=row["input_ids"]),
            stopping=pb.Stopping(max_new_tokens=len(row["output_ids"]), ignore_eos=True),
        )
        for i, row in enumerate(rows)
    ]
    got: list[list[int]] = [[] for _ in rows]
    batch = 0
    for call in ("prefill", "decode"):
        stream = (
            process.stub.Prefill(pb.PrefillRequest(requests=requests, owner="reference", max_step_tokens=max_step_tokens))
            if call == "prefill"
            else process.stub.Decode(
                pb.DecodeRequest(batch_ids=[batch], owner="reference", max_step_tokens=max_step_tokens)
            )
        )
        for step in stream:
            batch = step.batch_id
            columns = step.intermediates
            for number, token in zip(columns.request_id, columns.token_id, strict=True):
                got[number - 1].append(token)
    return got


def check(rows: Rows, got: list[list[int]]) -> None:
    """Equal, or different only from a tie on; ties are printed."""
    for row, ours in zip(rows, got, strict=True):
        theirs = row["output_ids"]
        assert len(ours) == len(theirs)
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is not None:
            print(f"{row['prompt'][:30]!r} differs at token {at}; the best two logits are {row['gaps'][at]} apart")
            assert row["gaps"][at] <= TIE


@pytest.fixture(scope="module")
def process(shard: Callable[..., ShardProcess], embedded_model: Path) -> ShardProcess:
    return shard(embedded_model)


def test_all_prompts_as_one_batch(process: ShardProcess, reference: Rows) -> None:
    check(reference, answers(process, reference))


@pytest.mark.parametrize("number", [0, 7, 16])
def test_three_alone(process: ShardProcess, reference: Rows, number: int) -> None:
    check([reference[number]], answers(process, [reference[number]]))


def test_three_in_small_chunks(process: ShardProcess, reference: Rows) -> None:
    rows = [reference[i] for i in (1, 11, 15)]
    check(rows, answers(process, rows, max_step_tokens=7))


def test_the_stored_reference_is_what_transformers_says(embedded_model: Path, reference: Rows) -> None:
    """Three prompts are computed anew, teacher-forced: at every place the best token is the stored one, or tied with it."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(embedded_model, gguf_file="model.gguf", dtype=torch.float32)
    for row in (reference[2], reference[11], reference[17]):
        with torch.inference_mode():
            logits = model(torch.tensor([row["input_ids"] + row["output_ids"]])).logits[0, len(row["input_ids"]) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(row["output_ids"])[:, None])[:, 0]
        assert bool((logits.max(-1).values - chosen <= TIE).all())
