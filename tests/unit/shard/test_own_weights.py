"""A GGUF served in its own 4- and 8-bit weights: near float32, and the same to the last bit whatever shares the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace._common.model_folder import ModelFolder
from headrace_shard.backends import choose_backend
from headrace_shard.backends.base import Backend
from headrace_shard.backends.cpu_backend import CpuBackend
from headrace_shard.backends.torch_backend import TorchBackend
from headrace_shard.kernels import build as building
from headrace_shard.kernels.library import Library
from headrace_shard.loading import load
from headrace_shard.models import load_model
from headrace_shard.parallel.group import Alone, Group
from headrace_shard.settings import ShardSettings
from headrace_shard.weights import open_weights
from headrace_shard.weights.source import Blocks
from tests.models import write_tiny_model
from tests.tiny_gguf import write_tiny_gguf
from tests.unit.shard.test_models import logits_of
from tests.unit.shard.test_parallel import one_chunk
from tests.unit.shard.test_shared_memory import on_ranks

CPU = torch.device("cpu")
LENGTHS = (1, 2, 17, 40, 23, 33)

pytestmark = pytest.mark.skipif(
    building.compiler() is None and not building.library_path().exists(), reason="no compiler: torch serves here"
)


def own_backend() -> Backend:
    return choose_backend(torch.float32, CPU, Alone(), 2, own_weights=True)


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 290, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize(("layers", "bound"), [("Q4_0", 0.02), ("Q4_1", 0.02), ("Q8_0", 0.001)])
def test_own_weights_are_near_float32(layers: str, bound: float, tmp_path: Path) -> None:
    """The same weights, unpacked: what differs is the rounding of activations and of the KV cache."""
    folder = write_tiny_gguf(tmp_path, layers)
    exact = logits_of(folder, sequences(), 100, TorchBackend(torch.float32, CPU, Alone()))
    own = logits_of(folder, sequences(), 100, own_backend())
    expected = torch.cat(exact).log_softmax(-1)
    divergence = (expected.exp() * (expected - torch.cat(own).log_softmax(-1))).sum(-1).mean()
    assert 0 < divergence < bound


@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 6, "head_dim": 32}, {"head_dim": 8, "num_attention_heads": 8}])
@pytest.mark.parametrize("layers", ["Q4_1", "Q8_0"])
def test_logits_do_not_depend_on_chunks_or_mates(layers: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny_gguf(tmp_path, layers, **changes)
    whole = logits_of(folder, sequences(), 100, own_backend())
    for chunk in (1, 3, 7):
        for got, expected in zip(logits_of(folder, sequences(), chunk, own_backend()), whole, strict=True):
            assert same(got, expected, changes)
    for tokens, expected in zip(sequences(), whole, strict=True):
        assert same(logits_of(folder, [tokens], 100, own_backend())[0], expected, changes)


def same(got: torch.Tensor, expected: torch.Tensor, changes: dict[str, Any]) -> bool:
    """Equal bits where attention is the kernels' own; heads that they do not cover are left to torch."""
    return torch.equal(got, expected) if changes.get("head_dim") != 8 else torch.allclose(got, expected, atol=0.5)


@pytest.mark.parametrize("layers", ["Q4_1", "Q8_0", "F32"])
@pytest.mark.parametrize("heads", [(6, 3), (8, 2)])
def test_two_and_three_ranks_agree_with_one_to_the_last_bit(layers: str, heads: tuple[int, int], tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 32}
    folder = write_tiny_gguf(tmp_path, layers, hidden_size=96, vocab_size=301, intermediate_size=480, **sizes)
    tokens, opened = sequences()[3], ModelFolder.open(folder)

    def run(group: Group) -> torch.Tensor:
        with torch.inference_mode():
            backend = CpuBackend(group, Library(), 1, layers != "F32")
            model = load_model(opened, open_weights(opened), backend, group.rank, group.world_size)
            backend.allocate_kv(model.layers, 8, model.attention)
            return model.forward(one_chunk(tokens)).clone()

    whole = run(Alone())
    for world_size in (2, 3):
        assert torch.equal(on_ranks(world_size, tmp_path / "meet", run)[0], whole)
    parts = on_ranks(4, tmp_path / "meet", run)[0]  # more ranks round their sums in another order, no more
    kept = whole.softmax(-1) * (whole.log_softmax(-1) - parts.log_softmax(-1))
    assert kept.sum(-1).mean() < 2e-3


def test_q_and_k_come_in_the_order_of_transformers(tmp_path: Path) -> None:
    folder = ModelFolder.open(write_tiny_gguf(tmp_path, "Q8_0"))
    weights, name = open_weights(folder), "model.layers.1.self_attn.q_proj.weight"
    dense = weights.get(name, (64, 64), rows=range(16, 48))
    blocks = weights.matrix(name, (64, 64), rows=range(16, 48), kinds=(8,))
    assert isinstance(blocks, Blocks)
    backend = own_backend()
    packed = backend.pack_linear([blocks])
    assert isinstance(backend, CpuBackend)
    assert torch.allclose(backend._linear(torch.eye(64), None, packed), dense.T, atol=1e-4)
    # A slice between blocks comes unpacked.
    assert isinstance(weights.matrix(name, (64, 64), columns=range(16, 48), kinds=(8,)), torch.Tensor)


@pytest.mark.parametrize(
    ("layers", "dtype", "format_", "kv_bytes"),
    [
        ("Q4_1", None, "q4_1", 2), ("Q4_0", None, "q4_0", 2), ("Q4_1", "float32", "", 4), ("F16", None, "q8_0", 2),
        ("Q5_0", None, "", 4),
    ],
)
def test_a_gguf_is_served_in_its_own_weights_by_default(
    layers: str, dtype: str | None, format_: str, kv_bytes: int, tmp_path: Path
) -> None:
    """F16 layers are unpacked beside an 8-bit table; formats that the kernels have not are unpacked all."""
    folder = write_tiny_gguf(tmp_path, layers)
    settings = ShardSettings(model_folder=str(folder), dtype=dtype, threads=1, max_batch_total_tokens=512)
    loaded = load(settings, ModelFolder.open(folder), "")
    assert (loaded.dtype, loaded.quantization) == ("float32", format_)
    backend = loaded.model._backend  # type: ignore[attr-defined]
    assert backend.kv_dtype(loaded.model.attention).itemsize == kv_bytes


def test_safetensors_stay_float32(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    settings = ShardSettings(model_folder=str(folder), threads=1, max_batch_total_tokens=512)
    loaded = load(settings, ModelFolder.open(folder), "")
    assert (loaded.dtype, loaded.quantization) == ("float32", "")


def test_weights_that_are_no_numbers_are_noticed(tmp_path: Path) -> None:
    folder = write_tiny_gguf(tmp_path, "Q8_0")
    path = folder / "model.gguf"
    weights = open_weights(ModelFolder.open(folder))
    entry = weights.entries["blk.1.ffn_down.weight"]  # type: ignore[attr-defined]
    data = bytearray(path.read_bytes())
    at = weights._start + entry.offset  # type: ignore[attr-defined]
    data[at : at + 2] = b"\x00\x7e"  # a scale that is not a number
    path.write_bytes(bytes(data))
    logits = logits_of(folder, [[5, 6, 7]], 100, own_backend())[0]
    assert not bool(torch.isfinite(logits).any())
