"""The model folder: the only form in which router and shards see a model.

    config.json  generation_config.json  tokenizer.json  tokenizer_config.json
    chat_template.jinja  additional_chat_templates/NAME.jinja
    *.safetensors (with model.safetensors.index.json) or model.gguf

The launcher makes or finds it once; nothing here knows hubs, caches or GGUF metadata.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace._common.errors import StartupError

GGUF_NAME = "model.gguf"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that was found to hold a readable config and tokenizer."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path) -> ModelFolder:
        """Read the folder's JSON files.

        Raises:
            StartupError: config.json or tokenizer.json is missing, or a file is not JSON; names the file.
        """
        folder = Path(path)
        if not (folder / "config.json").is_file():
            raise StartupError(f"{folder} is not a model folder: it has no config.json")
        if not (folder / "tokenizer.json").is_file():
            raise StartupError(f"{folder} is not a model folder: it has no tokenizer.json")
        return cls(
            folder, read_json(folder / "config.json"), read_json(folder / "generation_config.json", missing_ok=True),
            read_json(folder / "tokenizer_config.json", missing_ok=True),
        )

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The part of the config that describes the decoder (multimodal configs nest it)."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every end token, once each, from the generation config, else from the config."""
        for source in (self.generation_config, self.config, self.text_config):
            ids = source.get("eos_token_id")
            if ids is not None and ids != []:
                return tuple(dict.fromkeys(ids if isinstance(ids, list) else [ids]))
        return ()

    @cached_property
    def max_positions(self) -> int:
        """Longest sequence, in tokens, that the model was made for; 0 if the config does not say."""
        return int(self.text_config.get("max_position_embeddings") or self.text_config.get("n_positions") or 0)

    @cached_property
    def special_texts(self) -> dict[str, str]:
        """Texts of the named special tokens, of SPECIAL_TOKENS, where there are such."""
        texts = {}
        for name in SPECIAL_TOKENS:
            value = self.tokenizer_config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                texts[name] = text
        return texts

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """The model's chat templates (Jinja source) by name, `default` the one for every conversation.

        .jinja files (`chat_template.jinja`, `additional_chat_templates/NAME.jinja`), else the older JSON places.

        Raises:
            StartupError: a file cannot be read; names it.
        """
        files = {path.stem: path for path in sorted(self.path.glob("additional_chat_templates/*.jinja"))}
        if (jinja := self.path / "chat_template.jinja").is_file():
            files["default"] = jinja
        if files:
            return {name: read_text(path) for name, path in files.items()}
        for source in (read_json(self.path / "chat_template.json", missing_ok=True), self.tokenizer_config):
            if found := named_templates(source.get("chat_template")):
                return found
        return {}

    @property
    def gguf(self) -> Path | None:
        """The GGUF file whose tensors are this model's weights, if it is of that kind."""
        path = self.path / GGUF_NAME
        return path if path.is_file() else None


def named_templates(value: Any) -> dict[str, str]:
    """The templates in a `chat_template` member: one, or several with names; {} if there is none."""
    if isinstance(value, str):
        return {"default": value}
    items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    named = {item.get("name"): item.get("template") for item in items}
    return {name: source for name, source in named.items() if isinstance(name, str) and isinstance(source, str)}


def read_text(path: Path) -> str:
    """The text in a file.

    Raises:
        StartupError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"{path} is not text in UTF-8") from None


def read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in a file; {} if it may be missing and is.

    Raises:
        StartupError: the file cannot be read, or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise StartupError(f"{path} does not exist") from None
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise StartupError(f"{path} is not JSON that can be read: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds no JSON object")
    return value
