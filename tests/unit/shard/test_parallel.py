"""Several ranks in one process, each on a thread: every part of a model computes what the whole does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace._common.model_folder import ModelFolder
from headrace_shard.backends.torch_backend import TorchBackend
from headrace_shard.models import load_model
from headrace_shard.parallel import descriptor
from headrace_shard.parallel.runner import Follower, Leader
from headrace_shard.step import Chunk, Ints, StepInput
from headrace_shard.weights import open_weights
from tests.models import write_tiny_model

CPU = torch.device("cpu")


class ThreadGroup:
    """One rank of a group whose ranks are threads of this process."""

    def __init__(self, rank: int, world_size: int, shared: dict[str, Any]) -> None:
        self.rank, self.world_size, self._shared = rank, world_size, shared

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._shared["parts"][self.rank] = x
        self._shared["barrier"].wait(30)
        parts = list(self._shared["parts"])
        self._shared["barrier"].wait(30)
        return parts

    def room(self, rows: int, width: int) -> torch.Tensor:
        return torch.empty((rows, width))

    def sum(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, halves: Sequence[int] | None = None
    ) -> torch.Tensor:
        total = torch.stack(self._exchange(x)).sum(0)
        return total if residual is None else residual.add_(total)

    def send(self, values: Ints) -> None:
        descriptor.send(self, values)

    def receive(self) -> Ints:
        return descriptor.receive(self)

    def recordable(self, rows: int, width: int) -> bool:
        return False

    def run(self, calls: Callable[[int | None], int]) -> None:
        raise AssertionError("not recordable")

    def limit(self, seconds: float) -> float:
        return seconds

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange(x.clone())[0])


def on_ranks(world_size: int, run: Callable[[ThreadGroup], Any]) -> list[Any]:
    shared = {"parts": [None] * world_size, "barrier": threading.Barrier(world_size)}
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: run(ThreadGroup(rank, world_size, shared)), range(world_size)))


def one_chunk(tokens: list[int]) -> StepInput:
    count = len(tokens)
    blocks = -(-count // 16)
    positions = np.arange(count, dtype=np.int64)
    return StepInput(
        np.array(tokens, dtype=np.int64), positions, 16 + positions, np.zeros((0, 0), dtype=np.int32),
        np.zeros(0, dtype=np.int64), (Chunk(0, count, 0, np.arange(1, blocks + 1, dtype=np.int32)),), positions, prompts=count,
    )


KINDS: dict[str, dict[str, Any]] = {
    "uneven": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 301},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True, "vocab_size": 299},
    "one-kv-head": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_together_are_the_whole(kind: str, world_size: int, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, **KINDS[kind])
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval().float()
    for name, tensor in theirs.named_parameters():
        torch.nn.init.normal_(tensor, mean=1.0 if "norm" in name else 0.0, std=0.2)
    (folder / "model.safetensors").unlink()
    theirs.save_pretrained(folder)
    tokens = torch.randint(3, 290, (37,)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    opened = ModelFolder.open(folder)

    def run(group: ThreadGroup) -> torch.Tensor:
        with torch.inference_mode():
            backend = TorchBackend(torch.float32, CPU, group)
            model = load_model(opened, open_weights(opened), backend, group.rank, group.world_size)
            backend.allocate_kv(model.layers, 8, model.attention)
            return model.forward(one_chunk(tokens))

    logits = on_ranks(world_size, run)[0]
    assert logits.shape == expected.shape
    assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-4)


def steps() -> st.SearchStrategy[StepInput]:
    @st.composite
    def make(draw: st.DrawFn) -> StepInput:
        rows, width = draw(st.integers(0, 5)), draw(st.integers(1, 4))
        rng = np.random.default_rng(draw(st.integers(0, 10**6)))
        chunks, offset = [], rows
        for _ in range(draw(st.integers(0 if rows else 1, 3))):
            length = draw(st.integers(1, 3000))
            table = rng.integers(1, 99, draw(st.integers(1, 9)), dtype=np.int32)
            chunks.append(Chunk(offset, length, draw(st.integers(0, 99)), table))
            offset += length

        def numbers(count: int) -> Any:
            return rng.integers(0, 1000, count, dtype=np.int64)

        return StepInput(
            numbers(offset), numbers(offset), numbers(offset),
            rng.integers(0, 99, (rows, width if rows else 0), dtype=np.int32), numbers(rows), tuple(chunks),
            numbers(rows + len(chunks)), prompts=draw(st.integers(0, offset)),
        )

    return make()


@settings(deadline=None, max_examples=40)
@given(steps())
def test_a_step_reaches_every_rank_as_it_is(step: StepInput) -> None:
    def run(group: ThreadGroup) -> StepInput:
        if group.rank == 0:
            group.send(descriptor.encode(step))
            return step
        return descriptor.decode(group.receive())

    for got in on_ranks(3, run):
        for name in ("token_ids", "positions", "slots", "decode_tables", "decode_lengths", "logit_rows"):
            assert np.array_equal(getattr(got, name), getattr(step, name)), name
        assert (got.prompts, len(got.chunks)) == (step.prompts, len(step.chunks))
        for a, b in zip(got.chunks, step.chunks, strict=True):
            assert (a.offset, a.length, a.start) == (b.offset, b.length, b.start)
            assert np.array_equal(a.table, b.table)


class Recorder:
    """Stands for a model: notes the steps, and may fail."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.fails = False

    def forward(self, step: StepInput) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("out of memory")
        self.steps.append(step.token_ids.tolist())
        return torch.zeros(1, 1)


def test_followers_run_what_the_leader_runs_and_end_when_it_does() -> None:
    models = [Recorder(), Recorder()]

    def run(group: ThreadGroup) -> Any:
        if group.rank == 0:
            leader = Leader(models[0], group)  # type: ignore[arg-type]
            leader.forward(one_chunk([5, 6]))
            leader.idle()
            leader.forward(one_chunk([7]))
            leader.stop()
            return None
        follower = Follower(models[1], group, 10.0)  # type: ignore[arg-type]
        assert follower.trouble() is not None
        follower.start()
        follower._thread.join(30)
        return follower.trouble()

    trouble = on_ranks(2, run)[1]
    assert models[1].steps == models[0].steps == [[5, 6], [7]]
    assert trouble.kind == "lost"


def test_a_follower_that_fails_says_why() -> None:
    model = Recorder()
    model.fails = True

    def run(group: ThreadGroup) -> Any:
        if group.rank == 0:
            Leader(Recorder(), group).forward(one_chunk([5]))  # type: ignore[arg-type]
            return None
        follower = Follower(model, group, 10.0)  # type: ignore[arg-type]
        follower.start()
        follower._thread.join(30)
        return follower.trouble()

    trouble = on_ranks(2, run)[1]
    assert trouble.kind == "failed"
    assert trouble.reason == "rank 1 failed in a step: out of memory"
