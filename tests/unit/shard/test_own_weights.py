"""Weights as the files have them, or packed: near float32, and the same to the last bit whatever shares the step."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_shard.backends import choose_backend
from headrace_shard.backends.base import Backend
from headrace_shard.backends.cpu_backend import CpuBackend
from headrace_shard.backends.torch_backend import TorchBackend
from headrace_shard.kernels import build as building
from headrace_shard.kernels.library import Library
from headrace_shard.loading import Loaded, load
from headrace_shard.models import load_model
from headrace_shard.parallel.group import Alone, Group
from headrace_shard.roofline import Roofline
from headrace_shard.settings import CPU_ISAS, ShardSettings
from headrace_shard.weights import open_weights
from headrace_shard.weights.precision import BY_DTYPE, BY_QUANTIZE, EXACT, OWN, Format, Precision, precision_of
from headrace_shard.weights.source import Blocks, Dense
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
    return choose_backend(OWN, CPU, Alone(), 2)


def write_halves(folder: Path, dtype: torch.dtype, **changes: Any) -> Path:
    """A tiny model whose safetensors are of 16 bits."""
    path = write_tiny_model(folder, **changes) / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return folder


def divergence(folder: Path, precision: Precision) -> float:
    """Mean KL divergence of next-token distributions from those of plain torch in float32."""
    exact = torch.cat(logits_of(folder, sequences(), 100, TorchBackend(torch.float32, CPU, Alone()))).log_softmax(-1)
    other = torch.cat(logits_of(folder, sequences(), 100, choose_backend(precision, CPU, Alone(), 2))).log_softmax(-1)
    return float((exact.exp() * (exact - other)).sum(-1).mean())


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 290, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize(("layers", "bound"), [("Q4_0", 0.02), ("Q4_1", 0.02), ("Q8_0", 0.001)])
def test_own_weights_are_near_float32(layers: str, bound: float, tmp_path: Path) -> None:
    """The same weights, unpacked: what differs is the rounding of activations and of the KV cache."""
    assert 0 < divergence(write_tiny_gguf(tmp_path, layers), OWN) < bound


@pytest.mark.parametrize(("quantize", "bound"), [("int8", 0.01), ("q4", 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_safetensors_are_near_float32(quantize: str, bound: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """Random weights of a tiny model are the worst case for 4 bits; tests/e2e/test_quality.py has a real one."""
    folder = write_halves(tmp_path, dtype)
    assert 0 < divergence(folder, BY_QUANTIZE[quantize]) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_safetensors_of_16_bits_are_computed_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    """Only the KV cache is rounded, to float16."""
    assert divergence(write_halves(tmp_path, dtype), OWN) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_rounded_to_16_bits_are_near_float32(dtype: str, tmp_path: Path) -> None:
    assert 0 < divergence(write_tiny_model(tmp_path), BY_DTYPE[dtype]) < 1e-3


@pytest.mark.parametrize("precision", [OWN, BY_QUANTIZE["int8"], BY_QUANTIZE["q4"]])
def test_logits_of_safetensors_do_not_depend_on_chunks(precision: Precision, tmp_path: Path) -> None:
    folder = write_halves(tmp_path, torch.bfloat16)
    whole, pieces = (logits_of(folder, sequences(), chunk, choose_backend(precision, CPU, Alone(), 2)) for chunk in (100, 5))
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


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


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 9, "model_type": "mistral"}])
def test_recorded_layers_equal_their_operations_one_by_one(changes: dict[str, Any], tmp_path: Path) -> None:
    """Steps of one row, of more rows than the buffers had, and of few again."""
    folder = write_tiny_gguf(tmp_path, "Q4_1", **changes)
    plain, recording = own_backend(), own_backend()
    plain.run = lambda layers, x: layers(x)  # type: ignore[method-assign]
    for tokens in ([[5]], sequences(), [[7, 9]]):
        for got, expected in zip(
            logits_of(folder, tokens, 50, recording), logits_of(folder, tokens, 50, plain), strict=True
        ):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_recorded_sums_equal_those_one_by_one(world_size: int, tmp_path: Path) -> None:
    """Steps of one row, of more rows than the buffers had, and of few again; before them an odd number of meetings or not."""
    sizes: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
    opened = ModelFolder.open(write_tiny_gguf(tmp_path, "Q4_1", hidden_size=96, vocab_size=301, **sizes))

    def run(group: Group) -> list[torch.Tensor]:
        logits = []
        with torch.inference_mode():
            backend = CpuBackend(group, Library(), 1, OWN)
            model = load_model(opened, open_weights(opened), backend, group.rank, group.world_size)
            backend.allocate_kv(model.layers, 8, model.attention)
            recorded = backend.run
            for tokens in (sequences()[0], sequences()[3], sequences()[1]):
                for way in (lambda layers, x: layers(x), recorded):
                    for meetings in (0, 1):
                        backend.run = way  # type: ignore[method-assign]
                        for _ in range(meetings):
                            group.sum(torch.zeros(1))
                        logits.append(model.forward(one_chunk(tokens)).clone())
        return logits

    got = on_ranks(world_size, tmp_path / "meet", run)[0]
    for at in range(0, len(got), 4):
        assert all(torch.equal(other, got[at]) for other in got[at + 1 : at + 4])


def same(got: torch.Tensor, expected: torch.Tensor, changes: dict[str, Any]) -> bool:
    """Equal bits where attention is the kernels' own; heads that they do not cover are left to torch."""
    return torch.equal(got, expected) if changes.get("head_dim") != 8 else torch.allclose(got, expected, atol=0.5)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("quantize", [None, "int8", "q4"])
def test_parts_together_are_the_whole(world_size: int, quantize: str | None, tmp_path: Path) -> None:
    """Ranks take slices of whole groups; their sums are rounded in another order than the whole's, no more."""
    sizes: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
    sizes["vocab_size"] = 301
    folder = write_halves(tmp_path, torch.bfloat16, **sizes) if quantize else write_tiny_gguf(tmp_path, "Q4_1", **sizes)
    tokens, opened = sequences()[3], ModelFolder.open(folder)

    def run(group: Group) -> tuple[torch.Tensor, set[str]]:
        with torch.inference_mode():
            backend = CpuBackend(group, Library(), 1, precision_of(None, quantize))
            model = load_model(opened, open_weights(opened), backend, group.rank, group.world_size)
            backend.allocate_kv(model.layers, 8, model.attention)
            return model.forward(one_chunk(tokens)).clone(), set(backend.packed)

    (whole, formats), (parts, formats_of_part) = run(Alone()), on_ranks(world_size, tmp_path / "meet", run)[0]
    whole, parts = whole.log_softmax(-1), parts.log_softmax(-1)
    assert parts.shape == whole.shape
    assert (whole.exp() * (whole - parts)).sum(-1).mean() < 2e-3
    assert formats == formats_of_part
@pytest.mark.parametrize("layers", ["Q4_1", "Q8_0", "F32"])
@pytest.mark.parametrize("heads", [(6, 3), (8, 2)])
def test_two_and_three_ranks_agree_with_one_to_the_last_bit(layers: str, heads: tuple[int, int], tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 32}
    folder = write_tiny_gguf(tmp_path, layers, hidden_size=96, vocab_size=301, intermediate_size=480, **sizes)
    tokens, opened = sequences()[3], ModelFolder.open(folder)

    def run(group: Group) -> torch.Tensor:
        with torch.inference_mode():
            backend = CpuBackend(group, Library(), 1, EXACT if layers == "F32" else OWN)
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
    blocks = weights.matrix(name, (64, 64), rows=range(16, 48), precision=OWN)
    assert isinstance(blocks, Blocks)
    backend = own_backend()
    packed = backend.pack_linear([blocks])
    assert isinstance(backend, CpuBackend)
    assert torch.allclose(backend._linear(torch.eye(64), None, packed), dense.T, atol=1e-4)
    # A slice between blocks comes unpacked.
    cut = weights.matrix(name, (64, 64), columns=range(16, 48), precision=OWN)
    assert isinstance(cut, Dense)
    assert cut.format == Format.FLOAT32


@pytest.mark.parametrize(
    ("layers", "dtype", "quantize", "held", "format_", "kv_bytes"),
    [
        ("Q4_1", None, None, {"Q4_1", "Q8_0"}, "q4_1", 2), ("Q4_0", None, None, {"Q4_0", "Q8_0"}, "q4_0", 2),
        ("Q4_1", "float32", None, {"float32"}, "", 4), ("F16", None, None, {"float16", "Q8_0"}, "q8_0", 2),
        ("BF16", None, None, {"bfloat16", "Q8_0"}, "q8_0", 2), ("Q5_0", None, None, {"int8", "Q8_0"}, "int8", 2),
        ("Q4_1", "bfloat16", None, {"bfloat16"}, "", 2), ("F16", None, "int8", {"int8", "Q8_0"}, "int8", 2),
        ("Q8_0", None, "q4", {"q4", "Q8_0"}, "q4", 2), ("Q4_1", None, "int8", {"Q4_1", "Q8_0"}, "q4_1", 2),
    ],
)
def test_how_a_gguf_is_held(
    layers: str, dtype: str | None, quantize: str | None, held: set[str], format_: str, kv_bytes: int, tmp_path: Path
) -> None:
    """In its own weights by default; what the kernels have no format for in 8 bits. The table is in Q8_0."""
    loaded = loaded_from(write_tiny_gguf(tmp_path, layers), dtype=dtype, quantize=quantize)
    assert (loaded.dtype, loaded.quantization) == (dtype or "float32", format_)
    backend = loaded.model._backend  # type: ignore[attr-defined]
    assert set(backend.packed) == set(loaded.roofline.formats) == held
    assert backend.kv_dtype(loaded.model.attention).itemsize == kv_bytes


@pytest.mark.parametrize(
    ("stored", "dtype", "quantize", "expected", "kv_bytes"),
    [
        (torch.float32, None, None, ("float32", ""), 4), (torch.bfloat16, None, None, ("bfloat16", ""), 2),
        (torch.float16, None, None, ("float16", ""), 2), (torch.bfloat16, "float32", None, ("float32", ""), 4),
        (torch.float32, "bfloat16", None, ("bfloat16", ""), 2), (torch.bfloat16, "float16", None, ("float16", ""), 2),
        (torch.bfloat16, None, "int8", ("float32", "int8"), 2), (torch.float32, None, "q4", ("float32", "q4"), 2),
    ],
)
def test_how_safetensors_are_held(
    stored: torch.dtype, dtype: str | None, quantize: str | None, expected: tuple[str, str], kv_bytes: int, tmp_path: Path
) -> None:
    loaded = loaded_from(write_halves(tmp_path, stored), dtype=dtype, quantize=quantize)
    assert (loaded.dtype, loaded.quantization) == expected
    assert loaded.model._backend.kv_dtype(loaded.model.attention).itemsize == kv_bytes  # type: ignore[attr-defined]


def test_what_the_memory_allows_is_said(tmp_path: Path) -> None:
    loaded = loaded_from(write_tiny_gguf(tmp_path, "Q4_1"))
    assert loaded.roofline.step_bytes == 2 * (3 * 64 * 128 + 2 * 64 * 64 + 2 * 64 * 32) // 32 * 20 + 304 * 64 // 32 * 34
    assert re.fullmatch(
        r"weights Q4_1 \+ Q8_0, 0 MB a step; memory reads [\d.]+ GB/s: at most \d+ tokens/s for one stream",
        str(loaded.roofline),
    )
    assert str(Roofline(("float32",), 5e8, 0.0)) == "weights float32, 500 MB a step"


def test_nothing_to_pack_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded_from(write_tiny_gguf(tmp_path / "a", "Q4_0"), quantize="int8")
    assert "--quantize int8 changes nothing: the weights are Q4_0 and Q8_0 already" in caplog.text
    with pytest.raises(StartupError, match=r"--quantize q4: no matrix .* has columns in whole groups of 32"):
        loaded_from(write_tiny_model(tmp_path / "b", hidden_size=40, intermediate_size=24, head_dim=4), quantize="q4")


def test_without_the_kernels_nothing_is_packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building, "FOLDER", tmp_path)
    monkeypatch.setattr(building, "compiler", lambda: None)
    with pytest.raises(StartupError, match="--quantize needs the CPU kernels: no C\\+\\+ compiler found"):
        choose_backend(BY_QUANTIZE["int8"], CPU, Alone())


@pytest.mark.parametrize("isa", CPU_ISAS)
def test_the_kernels_keep_to_the_instruction_set_that_is_asked_for(
    isa: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        loaded_from(write_tiny_gguf(tmp_path, "Q4_1"), max_cpu_isa=isa)
    [used] = re.findall(r"CPU kernels: (\w+), 1 thread\b", caplog.text)
    best = Library().variant
    assert used == min(isa, best, key=CPU_ISAS.index)


def loaded_from(folder: Path, **given: Any) -> Loaded:
    settings = ShardSettings(model_folder=str(folder), threads=1, max_batch_total_tokens=512, **given)
    return load(settings, ModelFolder.open(folder), "")


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
