"""What a model folder says of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder, read_json


def write(folder: Path, **files: Any) -> Path:
    """A folder with these files (`generation_config={...}` is generation_config.json); config and tokenizer are there."""
    for name, value in {"config": {}, "tokenizer": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, (5,)),
        ({"eos_token_id": [9, 5, 9, 7]}, {"eos_token_id": 6}, (9, 5, 7)),
        ({}, {"eos_token_id": [6, 6]}, (6,)),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": 8}}, (8,)),
        ({"eos_token_id": []}, {"eos_token_id": 6}, (6,)),
        ({"eos_token_id": 0}, {"eos_token_id": 6}, (0,)),
        ({}, {}, ()),
    ],
)
def test_end_tokens(tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert ModelFolder.open(write(tmp_path, generation_config=generation, config=config)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 512}, 512), ({"n_positions": 1024}, 1024), ({}, 0),
        ({"max_position_embeddings": None, "n_positions": 7}, 7), ({"text_config": {"max_position_embeddings": 9}}, 9),
    ],
)
def test_longest_sequence(tmp_path: Path, config: dict[str, Any], expected: int) -> None:
    assert ModelFolder.open(write(tmp_path, config=config)).max_positions == expected


def test_special_tokens_in_both_forms(tmp_path: Path) -> None:
    settings = {
        "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None, "unk_token": {"id": 3},
        "model_max_length": 1,
    }
    assert ModelFolder.open(write(tmp_path, tokenizer_config=settings)).special_texts == {
        "bos_token": "<s>", "eos_token": "</s>",
    }


def test_a_template_of_each_place_and_the_order_of_places(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert ModelFolder.open(folder).chat_templates == {}
    write(tmp_path, tokenizer_config={"chat_template": "of the tokenizer"})
    assert ModelFolder.open(folder).chat_templates == {"default": "of the tokenizer"}
    write(tmp_path, chat_template={"chat_template": "of its own JSON"})
    assert ModelFolder.open(folder).chat_templates == {"default": "of its own JSON"}
    (folder / "chat_template.jinja").write_text("of the .jinja \u2603", "utf-8")
    assert ModelFolder.open(folder).chat_templates == {"default": "of the .jinja \u2603"}


def test_several_templates_have_names(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}, "?", {"template": "x"}]
    folder = write(tmp_path, tokenizer_config={"chat_template": several})
    assert ModelFolder.open(folder).chat_templates == {"tool_use": "tools", "default": "plain"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("documents")
    (folder / "chat_template.jinja").write_text("a file")
    assert ModelFolder.open(folder).chat_templates == {"rag": "documents", "default": "a file"}


def test_a_gguf_is_found(tmp_path: Path) -> None:
    folder = ModelFolder.open(write(tmp_path))
    assert folder.gguf is None
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert folder.gguf == tmp_path / "model.gguf"
    assert folder.tokenizer_path == tmp_path / "tokenizer.json"


def one_line(path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        ModelFolder.open(path).chat_templates  # noqa: B018 - read when it is asked for
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert one_line(tmp_path / "nowhere") == f"{tmp_path}/nowhere is not a model folder: it has no config.json"
    (tmp_path / "config.json").write_text("{}")
    assert one_line(tmp_path) == f"{tmp_path} is not a model folder: it has no tokenizer.json"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a": ', "is not JSON"), (b"[1]", "holds no JSON object"), (b"\xff\xfe{", "is not JSON"), (b"", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(data)
    assert one_line(tmp_path).startswith(f"{tmp_path}/generation_config.json {reason}")


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert f"{tmp_path}/chat_template.jinja" in one_line(tmp_path)


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(StartupError, match=r"cannot read .*config.json: Is a directory"):
        read_json(tmp_path / "config.json")
    with pytest.raises(StartupError, match=r"none.json does not exist"):
        read_json(tmp_path / "none.json")
    assert read_json(tmp_path / "none.json", missing_ok=True) == {}
