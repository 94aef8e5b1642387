"""A step's tensors all lie on the backend's device. Torch's "meta" device stands for one that is not the CPU: it refuses
to mix with the CPU's tensors as a GPU does, and computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace._common.model_folder import ModelFolder
from headrace_shard.backends.torch_backend import TorchBackend
from headrace_shard.kv.blocks import BLOCK_SIZE
from headrace_shard.models import load_model
from headrace_shard.parallel.group import Alone
from headrace_shard.step import Chunk, StepInput
from headrace_shard.weights import open_weights
from tests.models import write_tiny_model

META = torch.device("meta")
MIXED = StepInput(  # two decode rows and a chunk of eight
    token_ids=np.arange(10), positions=np.concatenate(([3, 4], np.arange(8))), slots=BLOCK_SIZE + np.arange(10),
    decode_tables=np.ones((2, 1), dtype=np.int32), decode_lengths=np.array([4, 5]),
    chunks=(Chunk(2, 8, 0, np.ones(1, dtype=np.int32)),), logit_rows=np.array([0, 1, 9]), prompts=8,
)


@pytest.mark.parametrize("changes", [
    {}, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4},
])
def test_a_step_stays_on_its_device(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = ModelFolder.open(write_tiny_model(tmp_path, **changes))
    backend = TorchBackend(torch.bfloat16, META, Alone())
    with torch.inference_mode():
        model = load_model(folder, open_weights(folder), backend)
        backend.allocate_kv(model.layers, 4, model.attention)
        logits = model.forward(MIXED)
    assert (logits.device, logits.dtype, tuple(logits.shape)) == (META, torch.float32, (3, 300))
