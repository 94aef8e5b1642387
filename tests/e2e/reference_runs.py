"""Runs of the reference prompts over gRPC, and their comparison with what transformers said."""

from __future__ import annotations

from typing import Any

from headrace.v1 import generation_pb2 as pb
from tests.processes import ShardProcess

Rows = list[dict[str, Any]]
TIE = 1e-3  # logits this close may change places by rounding


def answers(
    process: ShardProcess, rows: Rows, max_step_tokens: int = 0, timings: list[pb.Timings] | None = None
) -> list[list[int]]:
    """Output ids of the prompts, run as one batch; `timings` of the steps are appended."""
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
            if timings is not None:
                timings.append(step.timings)
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
