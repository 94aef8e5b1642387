"""What each format of the weights costs in quality: next-token distributions against those in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from headrace._common.model_folder import ModelFolder
from headrace_shard.backends import choose_backend
from headrace_shard.kernels.build import BuildFailed
from headrace_shard.kernels.library import Library
from headrace_shard.kv.blocks import BLOCK_SIZE, blocks_for
from headrace_shard.models import load_model
from headrace_shard.parallel.group import Alone
from headrace_shard.step import Chunk, StepInput
from headrace_shard.weights import WeightSource, open_weights
from headrace_shard.weights.dequantize import F32
from headrace_shard.weights.precision import BY_DTYPE, BY_QUANTIZE, EXACT, OWN, Precision
from headrace_shard.weights.source import Blocks, Dense

TEXT = Path(__file__).parents[2] / "docs/architecture.md"
TOKENS = 512


class Unpacked:
    """The model's values as a checkpoint of float32 has them."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def matrix(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None,
        precision: Precision = EXACT, head: bool = False,
    ) -> Blocks | Dense:
        return Dense.of(self._source.get(name, shape, rows, columns), precision.format_of(F32, head))


@dataclass(frozen=True)
class Format:
    """How the weights are held, and the largest mean KL divergence from float32 that this may cost."""

    name: str
    precision: Precision
    bound: float
    unpacked: bool = True  # the model as a float32 checkpoint; else its GGUF


FORMATS = [
    Format("the GGUF's own 4 and 8 bits", OWN, 4e-3, unpacked=False), Format("q4", BY_QUANTIZE["q4"], 4e-3),
    Format("int8", BY_QUANTIZE["int8"], 2e-3), Format("bfloat16", BY_DTYPE["bfloat16"], 2e-4),
    Format("float16", BY_DTYPE["float16"], 1e-5),
]


@pytest.fixture(scope="module")
def ids(embedded_model: Path) -> list[int]:
    folder = ModelFolder.open(embedded_model)
    return Tokenizer.from_file(str(folder.tokenizer_path)).encode(TEXT.read_text("utf-8")).ids[:TOKENS]


def log_probabilities(
    folder: Path, ids: list[int], precision: Precision, unpacked: bool = True, prompt: bool = True
) -> torch.Tensor:
    """[tokens, vocab] of the text as one prompt, or as tokens that were generated, in one step."""
    opened = ModelFolder.open(folder)
    backend = choose_backend(precision, torch.device("cpu"), Alone(), 2)
    weights: Any = open_weights(opened)
    weights = Unpacked(weights) if unpacked else weights
    positions = np.arange(len(ids), dtype=np.int64)
    table = np.arange(1, blocks_for(len(ids)) + 1, dtype=np.int32)
    step = StepInput(
        np.array(ids, dtype=np.int64), positions, BLOCK_SIZE + positions, np.zeros((0, 0), dtype=np.int32),
        np.zeros(0, dtype=np.int64), (Chunk(0, len(ids), 0, table),), positions,
        prompts=len(ids) if prompt else 0,
    )
    with torch.inference_mode():
        model = load_model(opened, weights, backend)
        backend.allocate_kv(model.layers, len(table), model.attention)
        return model.forward(step).log_softmax(-1)


@pytest.fixture(scope="module")
def exact(embedded_model: Path, ids: list[int]) -> torch.Tensor:
    try:
        Library()
    except BuildFailed:
        pytest.skip("no compiler: torch serves float32 here")
    return log_probabilities(embedded_model, ids, EXACT)


def perplexity(log_probs: torch.Tensor, ids: list[int]) -> float:
    return float(torch.exp(-log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean()))


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    return float((exact.exp() * (exact - other)).sum(-1).mean())


@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "generated"])
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_weights_stay_near_float32(
    kind: Format, prompt: bool, embedded_model: Path, ids: list[int], exact: torch.Tensor
) -> None:
    made = log_probabilities(embedded_model, ids, kind.precision, kind.unpacked, prompt)
    apart, best = divergence(exact, made), float((exact.argmax(-1) == made.argmax(-1)).float().mean())
    before, after, what = perplexity(exact, ids), perplexity(made, ids), "a prompt" if prompt else "generated"
    print(
        f"{kind.name}, {what}: mean KL {apart:.2e}, perplexity {after:.3f} (float32 {before:.3f}), best token equal {best:.1%}"
    )
    assert 0 < apart < kind.bound
    assert abs(after / before - 1) < 0.03
