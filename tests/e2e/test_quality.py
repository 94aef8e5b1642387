"""What the embedded model's own weights cost in quality: next-token distributions against those in float32."""

from __future__ import annotations

from pathlib import Path

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
from headrace_shard.weights import open_weights

TEXT = Path(__file__).parents[2] / "docs/architecture.md"
TOKENS = 512
BOUND = 4e-3  # mean KL divergence; 4-bit layers, 8-bit head, rounded activations, float16 KV cache


def log_probabilities(folder: ModelFolder, ids: list[int], own_weights: bool) -> torch.Tensor:
    """[tokens, vocab] of the text as one prompt."""
    backend = choose_backend(torch.float32, torch.device("cpu"), Alone(), 2, own_weights)
    positions = np.arange(len(ids), dtype=np.int64)
    table = np.arange(1, blocks_for(len(ids)) + 1, dtype=np.int32)
    step = StepInput(
        np.array(ids, dtype=np.int64), positions, BLOCK_SIZE + positions, np.zeros((0, 0), dtype=np.int32),
        np.zeros(0, dtype=np.int64), (Chunk(0, len(ids), 0, table),), positions,
    )
    with torch.inference_mode():
        model = load_model(folder, open_weights(folder), backend)
        backend.allocate_kv(model.layers, len(table), model.attention)
        return model.forward(step).log_softmax(-1)


def test_own_weights_stay_near_float32(embedded_model: Path) -> None:
    try:
        Library()
    except BuildFailed:
        pytest.skip("no compiler: torch serves float32 here")
    folder = ModelFolder.open(embedded_model)
    text = TEXT.read_text("utf-8")
    ids = Tokenizer.from_file(str(folder.tokenizer_path)).encode(text).ids[:TOKENS]
    exact, own = (log_probabilities(folder, ids, own) for own in (False, True))
    divergence = float((exact.exp() * (exact - own)).sum(-1).mean())
    perplexity = [float(torch.exp(-p[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean())) for p in (exact, own)]
    agree = float((exact.argmax(-1) == own.argmax(-1)).float().mean())
    print(f"mean KL {divergence:.2e}, perplexity {perplexity[0]:.2f} and {perplexity[1]:.2f}, best token equal {agree:.1%}")
    assert 0 < divergence < BOUND
    assert abs(perplexity[1] / perplexity[0] - 1) < 0.03
