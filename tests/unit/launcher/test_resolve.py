"""Every kind of model source, and one clear line for every kind of broken one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_launcher.models import embedded
from headrace_launcher.models.resolve import Resolved, resolve
from headrace_launcher.private import CacheProvider
from tests.models import write_tiny_model


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheProvider]:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    with contextlib.ExitStack() as stack:
        yield CacheProvider(stack, pytest.fail)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def find(model_id: str | Path, caches: CacheProvider, revision: str | None = None, hub: str | None = None) -> Resolved:
    return resolve(str(model_id), revision, hub, caches, lambda line: None)


def refusal(model_id: str | Path, caches: CacheProvider) -> str:
    with pytest.raises(StartupError) as caught:
        find(model_id, caches)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_folder_is_used_in_place(model: Path, caches: CacheProvider) -> None:
    before = {p: p.stat().st_mtime_ns for p in (model, *model.iterdir())}
    assert find(model, caches) == Resolved(model, str(model), None)
    assert {p: p.stat().st_mtime_ns for p in (model, *model.iterdir())} == before
    assert os.listdir(caches.writable().models) == []


def test_a_sharded_folder(tmp_path: Path, caches: CacheProvider) -> None:
    model = write_tiny_model(tmp_path / "parts", parts=3)
    assert find(model, caches).folder == model
    (model / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refusal(model, caches)
    (model / "model.safetensors.index.json").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refusal(model, caches)


def test_relative_and_home_paths(model: Path, caches: CacheProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    assert find("tiny", caches).folder == model
    monkeypatch.setenv("HOME", str(model.parent))
    assert find("~/tiny", caches).folder == model


@pytest.mark.parametrize("name", ["/no/such/dir", "./typo-model", "~/typo-model", "a/b/c", "/no/such.gguf", "no.gguf"])
def test_missing_paths_are_not_looked_for_on_the_hub(name: str, caches: CacheProvider) -> None:
    assert name.split("/")[-1] in refusal(name, caches)


def test_an_empty_folder(tmp_path: Path, caches: CacheProvider) -> None:
    (tmp_path / "empty").mkdir()
    text = refusal(tmp_path / "empty", caches)
    assert "config.json" in text
    assert "empty" in text


def test_a_cache_root_names_its_snapshot(tmp_path: Path, caches: CacheProvider) -> None:
    snapshot = tmp_path / "root/models--some--model/snapshots/0123"
    write_tiny_model(snapshot)
    assert str(snapshot) in refusal(tmp_path / "root", caches)
    assert str(snapshot) in refusal(tmp_path / "root/models--some--model", caches)


def test_a_folder_with_a_gguf(tmp_path: Path, caches: CacheProvider) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "g/model-q4.gguf").touch()
    assert "model-q4.gguf" in refusal(tmp_path / "g", caches)


def test_weights_cut_short(model: Path, caches: CacheProvider) -> None:
    path = model / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert "model.safetensors is cut short" in refusal(model, caches)
    os.truncate(path, 100)
    assert "model.safetensors is cut short" in refusal(model, caches)
    os.truncate(path, 3)
    assert "model.safetensors is not a safetensors file" in refusal(model, caches)


def test_weights_zeroed(model: Path, caches: CacheProvider) -> None:
    with open(model / "model.safetensors", "r+b") as file:
        file.write(bytes(4096))
    assert "model.safetensors is not a safetensors file" in refusal(model, caches)


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": [0]}}', b"\xff\xff"])
def test_damaged_headers(header: bytes, model: Path, caches: CacheProvider) -> None:
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "model.safetensors is not a safetensors file" in refusal(model, caches)


def test_a_pointer_instead_of_weights(model: Path, caches: CacheProvider) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    text = refusal(model, caches)
    assert "model.safetensors" in text
    assert "git-lfs" in text


def test_a_tensor_is_missing(model: Path, caches: CacheProvider) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "model.layers.2.input_layernorm.weight" in refusal(model, caches)


def test_weights_that_other_programs_packed(model: Path, caches: CacheProvider) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    text = refusal(model, caches)
    assert "gptq" in text
    assert "--quantize int8 or q4" in text


def test_an_index_that_lies(tmp_path: Path, caches: CacheProvider) -> None:
    model = write_tiny_model(tmp_path / "parts", parts=2)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.extra.weight" in refusal(model, caches)


def test_pickles_are_refused_unread(model: Path, caches: CacheProvider) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"not even a pickle")
    text = refusal(model, caches)
    assert "pytorch_model.bin" in text
    assert "safetensors" in text


def test_own_code_is_left_alone(model: Path, caches: CacheProvider, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.X"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "modeling_x.py").write_text("raise SystemExit('ran')")
    assert find(model, caches).folder == model
    assert "not run" in caplog.text


def test_no_tokenizer(model: Path, caches: CacheProvider) -> None:
    (model / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(model, caches)


def test_a_folder_that_may_not_be_read(model: Path, caches: CacheProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", deny)
    assert f"{model}: Permission denied" in refusal(model, caches)


def test_a_damaged_config(model: Path, caches: CacheProvider) -> None:
    (model / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(model, caches)


def test_a_slow_tokenizer_is_converted_once(model: Path, caches: CacheProvider) -> None:
    """vocab.json and merges.txt alone: GPT-2's older form."""
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    (model / "tokenizer.json").unlink()
    (model / "vocab.json").write_text(json.dumps(vocab))
    (model / "merges.txt").write_text("#version: 0.2\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    found = find(model, caches).folder
    assert found.parent == caches.writable().models
    assert (found / "model.safetensors").resolve() == model / "model.safetensors"
    assert ModelFolder.open(found).config["model_type"] == "llama"
    assert not (model / "tokenizer.json").exists()
    assert find(model, caches).folder == found


def test_a_revision_needs_a_hub_id(model: Path, caches: CacheProvider) -> None:
    for name in (str(model), "", "/no/such/dir"):
        with pytest.raises(StartupError, match="--revision"):
            find(name, caches, revision="main")


def test_hub_models_offline(tmp_path: Path, caches: CacheProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    root = tmp_path / "hub/models--some--model"
    commit = "0" * 39 + "1"
    write_tiny_model(root / "snapshots" / commit)
    (root / "refs").mkdir()
    (root / "refs/main").write_text(commit)
    found = find("some/model", caches, hub=str(tmp_path / "hub"))
    assert found == Resolved(root / "snapshots" / commit, "some/model", commit)
    with pytest.raises(StartupError, match=r"some/other is not cached and HF_HUB_OFFLINE"):
        find("some/other", caches, hub=str(tmp_path / "hub"))
    with pytest.raises(StartupError, match=r"some/model@v2 is not cached"):
        find("some/model", caches, revision="v2", hub=str(tmp_path / "hub"))


def test_the_default_model_offline_says_what_to_put_where(caches: CacheProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = refusal("", caches)
    assert embedded.FILE in text
    assert str(caches.writable().models) in text


def test_an_unreachable_index_says_what_to_put_where(caches: CacheProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    text = refusal("", caches)
    assert "cannot download" in text
    assert embedded.WHEEL in text
    assert sorted(p.name for p in caches.writable().models.iterdir()) == [".smollm2.lock"]


def test_a_wheel_with_the_wrong_checksum_is_removed(caches: CacheProvider) -> None:
    placed = caches.writable().models / embedded.WHEEL
    placed.write_bytes(b"something else")
    assert "wrong checksum" in refusal("", caches)
    assert not placed.exists()


def test_the_default_model_from_a_placed_file(caches: CacheProvider) -> None:
    with contextlib.ExitStack() as stack:
        os.environ.pop("HEADRACE_CACHE")
        source = embedded.fetch(CacheProvider(stack, pytest.fail), lambda line: None)
    target = caches.writable().models / embedded.FILE
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy(source, target)
    found = find("", caches)
    assert (found.name, found.sha) == (embedded.NAME, embedded.GGUF_SHA256)
    assert ModelFolder.open(found.folder).gguf is not None
    assert find(embedded.NAME, caches) == found
