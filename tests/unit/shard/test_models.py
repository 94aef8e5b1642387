"""Model families against `transformers` on tiny random weights, over ragged steps, chunks and both CPU backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_shard.backends import choose_backend
from headrace_shard.backends.onednn_backend import OneDnnBackend
from headrace_shard.backends.torch_backend import TorchBackend
from headrace_shard.batch import RunningBatch
from headrace_shard.kv.blocks import BlockManager, blocks_for
from headrace_shard.models import load_model
from headrace_shard.parallel.group import Alone
from headrace_shard.requests import Request
from headrace_shard.scheduler import build
from headrace_shard.weights import open_weights
from headrace_shard.weights.precision import EXACT
from tests.models import write_tiny_model

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama3-rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "llama-linear-rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama-wide-heads": {"head_dim": 32},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with random weights saved by transformers, and its model."""
    folder = write_tiny_model(tmp_path_factory.mktemp(request.param), **FAMILIES[request.param])
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(5)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for name, tensor in theirs.named_parameters():
        torch.nn.init.normal_(tensor, mean=1.0 if "norm" in name else 0.0, std=0.2)
    (folder / "model.safetensors").unlink()
    theirs.save_pretrained(folder)
    return folder, theirs


def logits_of(folder: Path, sequences: list[list[int]], chunk: int, backend: Any) -> list[torch.Tensor]:
    """All logits of each sequence, computed in ragged steps: prompts in chunks, the last token of each as a decode row."""
    opened = ModelFolder.open(folder)
    with torch.inference_mode():
        model = load_model(opened, open_weights(opened), backend)
        backend.allocate_kv(model.layers, 64, model.attention)
        rows, blocks = RunningBatch(len(sequences), 256), BlockManager(64)
        slots = []
        for number, tokens in enumerate(sequences):
            slot = rows.add(Request(number + 1, np.array(tokens, dtype=np.int32), 0, 8, prompt_logprobs=True), 1)
            taken = blocks.allocate(blocks_for(len(tokens)))
            assert taken is not None
            rows.hold(slot, taken)
            slots.append(slot)
        out: dict[int, list[torch.Tensor]] = {s: [] for s in slots}
        while any(rows.computed[s] < rows.known[s] for s in slots):
            left = {s: int(rows.known[s] - rows.computed[s]) for s in slots}
            decode = np.array([s for s in slots if left[s] == 1], dtype=np.int64)
            plan = build(rows, decode, [(s, min(chunk, left[s] - 1)) for s in slots if left[s] > 1], {})
            logits, at = model.forward(plan.input).clone(), 0
            for slot, count in zip(plan.slots.tolist(), plan.counts.tolist(), strict=True):
                out[slot].append(logits[at : at + count])
                at += count
            assert at == len(logits)
            rows.computed[plan.slots] += plan.counts
    return [torch.cat(out[s]) for s in slots]


@pytest.mark.parametrize("chunk", [3, 100])
def test_logits_equal_those_of_transformers(pair: tuple[Path, Any], chunk: int) -> None:
    folder, theirs = pair
    generator = torch.Generator().manual_seed(chunk)
    sequences = [torch.randint(3, 290, (n,), generator=generator).tolist() for n in (1, 2, 17, 40, 23)]
    ours = logits_of(folder, sequences, chunk, choose_backend(EXACT, CPU, Alone()))
    for tokens, got in zip(sequences, ours, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).logits[0]
        assert torch.allclose(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_packed_backend_equals_its_plain_twin(name: str, tmp_path: Path) -> None:
    if not OneDnnBackend.available(torch.float32, CPU):
        pytest.skip("this torch has no oneDNN: there is only the plain backend here")
    folder = write_tiny_model(tmp_path, **FAMILIES[name])
    sequences = [[5, 6, 7, 8, 9], [10]]
    plain = logits_of(folder, sequences, 4, TorchBackend(torch.float32, CPU, Alone()))
    packed = logits_of(folder, sequences, 4, OneDnnBackend(torch.float32, CPU, Alone()))
    for a, b in zip(plain, packed, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    exact = logits_of(folder, [[5, 6, 7, 8, 9]], 4, TorchBackend(torch.float32, CPU, Alone()))[0]
    half = logits_of(folder, [[5, 6, 7, 8, 9]], 4, TorchBackend(dtype, CPU, Alone()))[0]
    assert half.dtype == torch.float32
    assert (half.softmax(-1) - exact.softmax(-1)).abs().max() < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bloom"}, "model_type 'bloom'.*not supported; known: llama, mistral, qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 does not divide by num_key_value_heads 3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
        ({"intermediate_size": 96}, r"shape \(128, 64\); the config asks for \(96, 64\)"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in {**config, **changes}.items() if v is not None}))
    folder = ModelFolder.open(tmp_path)
    with pytest.raises(StartupError, match=message):
        load_model(folder, open_weights(folder), TorchBackend(torch.float32, CPU, Alone()))
