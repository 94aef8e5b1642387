"""GGUF files as model folders."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_launcher.models import embedded, gguf_config, gguf_file, gguf_header, gguf_tokenizer
from headrace_launcher.private import CacheProvider

TEXTS = (
    "Hello world", "", " ",
    "  two  spaces\n\n\n\ttab", "don't I'll we've", "naïve café ﬁ 日本語 😀👩‍👩‍👧", "price 12345 and 3.14",
    "<|im_start|>user\nhi<|im_end|>\n", "def f(x):\n    return x + 1  # ok\r\n", "<file_sep><repo_name>x", "\u0000\u200b",
    "ΑΒΓ абв עברית العربية", "https://a.b/c?d=e&f=1#g",
)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheProvider]:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    with contextlib.ExitStack() as stack:
        yield CacheProvider(stack, pytest.fail)


@pytest.fixture(scope="module")
def default_model() -> Path:
    with contextlib.ExitStack() as stack:
        return embedded.resolve(CacheProvider(stack, pytest.fail), lambda line: None)


def write_gguf(path: Path, arch: str = "llama", tensors: dict[str, Any] | None = None, **metadata: Any) -> Path:
    """A tiny GGUF file. Keys of `metadata` have __ for dots; None leaves a default out."""
    from gguf import GGUFWriter

    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "a", "b", "ab", "\u2581ab", "<tool>"]
    values: dict[str, Any] = {
        f"{arch}__block_count": 1, f"{arch}__context_length": 64, f"{arch}__embedding_length": 8,
        f"{arch}__feed_forward_length": 16, f"{arch}__attention__head_count": 2,
        f"{arch}__attention__layer_norm_rms_epsilon": 1e-5, "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__tokens": vocab, "tokenizer__ggml__scores": [0.0] * 259 + [-5.0, -6.0, -7.0, -1.0, -2.0, 0.0],
        "tokenizer__ggml__token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 4], "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2, **metadata,
    }
    writer = GGUFWriter(path, arch)
    for key, value in values.items():
        name = key.replace("__", ".")
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    for name, data in (tensors or {"token_embd.weight": np.zeros((len(vocab), 8), np.float32)}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config(path: Path) -> dict[str, Any]:
    return gguf_config.config(gguf_header.read(path))


def test_tokens_equal_those_of_transformers(default_model: Path) -> None:
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(default_model.parent, gguf_file=embedded.FILE)
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone(default_model: Path) -> None:
    """The original tokenizer splits numbers into digits, which transformers' conversion of a GGUF ignores."""
    ours = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    pieces = json.loads((default_model / "tokenizer.json").read_text("utf-8"))["pre_tokenizer"]["pretokenizers"]
    assert pieces[0] == {"type": "Digits", "individual_digits": True}
    assert [ours.id_to_token(i) for i in ours.encode("2024").ids] == list("2024")


def test_control_tokens_are_single_special_ids(default_model: Path) -> None:
    ours = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    added = ours.get_added_tokens_decoder()
    assert sorted(added) == list(range(17))
    assert all(token.special for token in added.values())
    for number, token in added.items():
        assert ours.encode(f"a{token.content}b").ids[1] == number


def test_config_equals_that_of_transformers(default_model: Path) -> None:
    from transformers import AutoConfig

    mine = AutoConfig.from_pretrained(default_model)
    theirs = AutoConfig.from_pretrained(default_model.parent, gguf_file=embedded.FILE)
    for name in json.loads((default_model / "config.json").read_text()):
        if name not in ("architectures", "rope_theta", "rms_norm_eps", "torch_dtype"):
            assert getattr(mine, name) == getattr(theirs, name), name
    assert mine.rope_parameters == theirs.rope_parameters
    assert mine.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)


def test_the_folder_is_whole(default_model: Path) -> None:
    folder = ModelFolder.open(default_model)
    assert folder.eos_token_ids == (2,)
    assert folder.gguf is not None
    assert "<|im_start|>" in folder.chat_templates["default"]
    assert folder.special_texts == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>"
    }


def test_a_derived_folder_is_made_once_and_again_when_the_file_changes(tmp_path: Path, caches: CacheProvider) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    lines: list[str] = []
    first = gguf_file.resolve(path, caches, lines.append)
    assert gguf_file.resolve(path, caches, lines.append) == first
    assert len(lines) == 1
    os.utime(path, (1, 1))
    assert gguf_file.resolve(path, caches, lines.append) != first


def test_templates_keep_their_names(tmp_path: Path, caches: CacheProvider) -> None:
    named: dict[str, Any] = {
        "tokenizer__chat_template": "plain", "tokenizer__chat_templates": ["tool_use", "../x"],
        "tokenizer__chat_template__tool_use": "tools", "tokenizer__chat_template__../x": "outside",
    }
    folder = gguf_file.resolve(write_gguf(tmp_path / "m.gguf", **named), caches, lambda line: None)
    assert ModelFolder.open(folder).chat_templates == {"default": "plain", "tool_use": "tools"}


def test_sentencepiece(tmp_path: Path) -> None:
    made = gguf_tokenizer.build(gguf_header.read(write_gguf(tmp_path / "m.gguf")))
    assert made.encode("ab").ids == [1, 263]
    assert made.encode("ab", add_special_tokens=False).tokens == ["\u2581ab"]
    assert made.encode("é", add_special_tokens=False).ids == [259, 3 + 0xC3, 3 + 0xA9]
    assert made.encode("a<tool>b", add_special_tokens=False).ids[2] == 264
    assert made.decode([263, 3 + 0xC3, 3 + 0xA9, 264]) == "abé<tool>"


def test_config_of_other_shapes(tmp_path: Path) -> None:
    made = config(write_gguf(
        tmp_path / "q.gguf", "qwen2", qwen2__attention__head_count_kv=1, qwen2__rope__freq_base=1e6,
        tokenizer__ggml__eot_token_id=5,
        tensors={"token_embd.weight": np.zeros((265, 8), np.float32), "output.weight": np.zeros((265, 8), np.float32)},
    ))
    assert (made["model_type"], made["num_key_value_heads"], made["head_dim"]) == ("qwen2", 1, 4)
    assert (made["rope_theta"], made["tie_word_embeddings"], made["vocab_size"]) == (1e6, False, 265)
    assert made["eos_token_id"] == [2, 5]


def test_rope_scaling(tmp_path: Path) -> None:
    made = config(write_gguf(tmp_path / "l.gguf", llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0))
    assert made["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors = np.array(gguf_config.llama3_divisors(500000.0, 128, scaling), np.float32)
    tensors = {"token_embd.weight": np.zeros((265, 256), np.float32), "rope_freqs.weight": divisors}
    values: dict[str, Any] = {"llama__embedding_length": 256, "llama__rope__freq_base": 500000.0}
    assert config(write_gguf(tmp_path / "3.gguf", tensors=tensors, **values))["rope_scaling"] == scaling
    tensors["rope_freqs.weight"] = divisors * np.linspace(1, 2, 64, dtype=np.float32)
    with pytest.raises(StartupError, match="rope_freqs"):
        config(write_gguf(tmp_path / "4.gguf", tensors=tensors, **values))


def test_llama3_divisors_equal_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(
        hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters={**scaling, "rope_theta": 500000.0}
    ), "cpu")
    divisors = gguf_config.llama3_divisors(500000.0, 128, scaling)
    ours = [500000.0 ** (-i / 128) / d for i, d in zip(range(0, 128, 2), divisors, strict=True)]
    assert np.allclose(theirs.numpy(), ours, rtol=1e-5)


@pytest.mark.parametrize(
    ("arch", "metadata", "word"),
    [
        ("bert", {}, "bert"),
        ("llama", {"llama__expert_count": 8}, "experts"),
        ("llama", {"llama__context_length": None}, "llama.context_length"),
        ("llama", {"tokenizer__ggml__model": "t5"}, "t5"),
        ("llama", {"tokenizer__ggml__tokens": None}, "vocabulary"),
        ("llama", {"tokenizer__ggml__scores": None}, "scores"),
        ("llama", {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "tekken"}, "tekken"),
        ("llama", {"llama__rope__scaling__type": "longrope"}, "longrope"),
    ],
)
def test_what_is_not_supported_is_named(
    arch: str, metadata: dict[str, Any], word: str, tmp_path: Path, caches: CacheProvider
) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch, **metadata)
    with pytest.raises(StartupError, match=word):
        gguf_file.resolve(path, caches, lambda line: None)
    assert not any(p.is_dir() for p in caches.writable().models.iterdir())


def test_every_cut_is_found(tmp_path: Path) -> None:
    """Wherever the file ends too early, the answer is one line that names it."""
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (*range(0, 64), *range(64, len(whole) - 32, 97), len(whole) - 33):
        cut.write_bytes(whole[:length])
        with pytest.raises(StartupError, match=r"cut\.gguf") as caught:
            gguf_header.read(cut)
        assert "\n" not in str(caught.value)


def test_noise_is_no_model(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "m.gguf").read_bytes())
    damaged = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(4, 2000, 4):
            data[at] = rng.integers(256)
        damaged.write_bytes(data)
        with contextlib.suppress(StartupError):
            header = gguf_header.read(damaged)
            gguf_config.config(header)
            gguf_tokenizer.build(header)


def test_the_header_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = write_gguf(tmp_path / "m.gguf", "qwen2", qwen2__rope__freq_base=1e6, tokenizer__ggml__add_bos_token=False)
    header, reader = gguf_header.read(path), GGUFReader(path)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert header.metadata[name] == field.contents(), name
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (list(info.shape), info.offset, info.size) == (tensor.shape.tolist(), tensor.data_offset, tensor.n_bytes)


def test_conversion_is_quick(default_model: Path, caches: CacheProvider) -> None:
    path = (default_model / "model.gguf").resolve()
    before = os.times()
    gguf_file.resolve(path, caches, lambda line: None)
    used = os.times()
    assert used.user + used.system - before.user - before.system < 5.0
