"""Cheap checks of weight files, so that a broken download is one clear line in milliseconds, not a crash after minutes.

Only headers are read. Format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, data).
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from headrace._common.errors import StartupError
from headrace._common.model_folder import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_LAYER_TENSORS = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)


def check_folder(folder: Path, config: dict[str, Any]) -> None:
    """Check the weights of a safetensors folder.

    Raises:
        StartupError: a file is missing, cut short or no safetensors file, or a tensor is missing; names it. Or the weights
            are packed in a way that only other servers read.
    """
    if packed := config.get("quantization_config"):
        method = packed.get("quant_method", "unknown") if isinstance(packed, dict) else "unknown"
        raise StartupError(
            f"{folder} holds weights packed by another program ({method} in config.json), which are not supported: "
            "take the model in 16 or 32 bits; --quantize int8 or q4 packs it at the start"
        )
    if (folder / INDEX).is_file():
        names = _check_index(folder)
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise StartupError(_no_weights(folder))
        _check_parts(folder, files)
        names = {name for file in files for name in read_header(file)}
    _check_tensors(folder, config, names)


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name -> dtype, shape, data_offsets.

    Raises:
        StartupError: the file is not whole, or not a safetensors file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            if start == b"version ":
                raise StartupError(f"{path} is a git-lfs pointer, not the weights: run `git lfs pull` in its folder")
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= 100_000_000:
                raise StartupError(f"{path} is not a safetensors file: its header is empty or damaged")
            if length + 8 > size:
                raise StartupError(f"{path} is cut short: {size} bytes, and its header alone has {length + 8}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise StartupError(f"{path} is not a safetensors file: its header is damaged") from None
    if not isinstance(header, dict):
        raise StartupError(f"{path} is not a safetensors file: its header is damaged")
    header.pop("__metadata__", None)
    try:
        expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (TypeError, KeyError, IndexError):
        raise StartupError(f"{path} is not a safetensors file: its header is damaged") from None
    if size < expected:
        raise StartupError(f"{path} is cut short: it has {size} bytes of {expected}")
    return header


def _check_index(folder: Path) -> set[str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{folder / INDEX} has no weight_map")
    for file in sorted(set(weight_map.values())):
        path = folder / str(file)
        if not path.is_file():
            raise StartupError(f"{path} is missing: {INDEX} lists it")
        found = read_header(path)
        for name, where in weight_map.items():
            if where == file and name not in found:
                raise StartupError(f"{path} has no tensor {name}, which {INDEX} says it has")
    return set(weight_map)


def _check_parts(folder: Path, files: list[Path]) -> None:
    for file in files:
        if match := _PART.fullmatch(file.name):
            for number in range(1, int(match[3]) + 1):
                part = folder / f"{match[1]}-{number:05}-of-{match[3]}.safetensors"
                if not part.is_file():
                    raise StartupError(f"{part} is missing: {file.name} is one of {int(match[3])} parts")


def _check_tensors(folder: Path, config: dict[str, Any], names: set[str]) -> None:
    """Every tensor of a Llama-like model must be there; other families are checked when they are loaded."""
    if config.get("model_type") not in _LLAMA_LIKE:
        return
    prefix = "" if any(name.startswith("layers.") for name in names) else "model."
    expected = [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"]
    for layer in range(int(config.get("num_hidden_layers") or 0)):
        expected += [f"{prefix}layers.{layer}.{part}.weight" for part in _LAYER_TENSORS]
    if not config.get("tie_word_embeddings", config.get("model_type") == "qwen2") and prefix:
        expected.append("lm_head.weight")
    missing = [name for name in expected if name not in names]
    if missing:
        raise StartupError(
            f"the *.safetensors in {folder} lack {len(missing)} tensor{'s' * (len(missing) > 1)} of the model, "
            f"the first is {missing[0]}"
        )


def _no_weights(folder: Path) -> str:
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickles:
        return (
            f"{folder} has only pickled weights ({pickles[0].name}), which can run code when they are loaded: "
            "*.safetensors are needed"
        )
    return f"{folder} has no *.safetensors"
