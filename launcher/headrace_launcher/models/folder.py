"""Local folders of safetensors, or of JSON files beside a model.gguf: checked, and used in place."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from headrace._common.errors import StartupError
from headrace._common.model_folder import GGUF_NAME, read_json
from headrace_launcher.models import gguf_header, weights
from headrace_launcher.private import CacheProvider, locked, new_folder

# Files of tokenizers that only transformers' slow classes read.
_SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
_CONVERT = (
    "import sys; from transformers import AutoTokenizer; "
    "made = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False, local_files_only=True); "
    "made.save_pretrained(sys.argv[2])"
)
_CONVERT_SECONDS = 300


def resolve(path: Path, caches: CacheProvider, say: Callable[[str], None], need_weights: bool = True) -> Path:
    """The model folder for a local folder: itself, unless its tokenizer must be converted.

    Raises:
        StartupError: it is no model, or not one that can be served; names the file at fault.
    """
    if not (path / "config.json").is_file():
        raise StartupError(_what_else(path))
    config = read_json(path / "config.json")
    if (path / GGUF_NAME).is_file():
        gguf_header.read(path / GGUF_NAME)
    elif need_weights:
        weights.check_folder(path, config)
    if "auto_map" in config:
        logging.getLogger(__name__).warning("%s carries code of its own, which is not run", path)
    if (path / "tokenizer.json").is_file():
        return path
    if not any((path / name).is_file() for name in _SLOW_FILES):
        raise StartupError(f"{path} has no tokenizer.json")
    return _with_converted_tokenizer(path, caches, say)


def _what_else(path: Path) -> str:
    """Why a folder without config.json is no model, and what was perhaps meant."""
    try:
        snapshots = sorted([*path.glob("models--*/snapshots/*/"), *path.glob("snapshots/*/")])
        ggufs = sorted(path.glob("*.gguf"))
        adapter = (path / "adapter_config.json").is_file()
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    if snapshots:
        return f"{path} is a cache of hub models, not a model: give the snapshot folder, for example {snapshots[0]}"
    if ggufs:
        return f"{path} has no config.json, but {ggufs[0].name}: give that file as --model-id {ggufs[0]}"
    if adapter:
        return f"{path} holds an adapter, not a model"
    return f"{path} is not a model folder: it has no config.json (and *.safetensors) in it"


def _with_converted_tokenizer(path: Path, caches: CacheProvider, say: Callable[[str], None]) -> Path:
    """A derived folder: links to the files of `path`, and the tokenizer.json that transformers makes for it."""
    stamps = [f"{p.name} {p.stat().st_size} {int(p.stat().st_mtime)}" for p in sorted(path.iterdir())]
    key = hashlib.sha256("\n".join([str(path.resolve()), *stamps]).encode()).hexdigest()[:16]
    name = f"{path.name}-{key}"
    for cache in caches.readable():
        if (cache.models / name).is_dir():
            return cache.models / name
    target = caches.writable().models / name
    with locked(target.parent / f".{name}.lock", say):
        if not target.is_dir():
            say("converting the tokenizer, once")
            with new_folder(target) as scratch:
                _convert(path, scratch)
                for file in path.iterdir():
                    if not (scratch / file.name).exists():
                        os.symlink(file.resolve(), scratch / file.name)
    return target


def _convert(path: Path, target: Path) -> None:
    try:
        run = subprocess.run(
            [sys.executable, "-c", _CONVERT, str(path), str(target)], stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=_CONVERT_SECONDS, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False,
        )
    except subprocess.TimeoutExpired:
        raise StartupError(f"the tokenizer of {path} could not be converted within {_CONVERT_SECONDS} s") from None
    if run.returncode or not (target / "tokenizer.json").is_file():
        lines = run.stderr.strip().splitlines() or ["no tokenizer.json came of it"]
        raise StartupError(f"the tokenizer of {path} cannot be converted to tokenizer.json: {lines[-1]}")
