"""GGUF files: a derived model folder is made once, with the metadata as the usual JSON files and a link to the file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace._common.errors import StartupError
from headrace._common.model_folder import GGUF_NAME
from headrace_launcher.private import CacheProvider, locked, new_folder

_VERSION = 2  # of the conversion: raise it when derived folders of older versions must not be used any more
_NAMED_TEMPLATE = "tokenizer.chat_template."  # the key of a template beside the default one, up to its name
_TEMPLATE_NAME = re.compile(r"\w+")


def resolve(path: Path, caches: CacheProvider, say: Callable[[str], None]) -> Path:
    """The derived model folder of a GGUF file.

    Raises:
        StartupError: the file is missing, damaged, or of a kind that is not supported.
    """
    name = _folder_name(path)
    for cache in caches.readable():
        if (cache.models / name).is_dir():
            return cache.models / name
    from headrace_launcher.models import gguf_header

    header = gguf_header.read(path)
    target = caches.writable().models / name
    with locked(target.parent / f".{name}.lock", say):
        if not target.is_dir():
            say(f"reading {path.name}, once")
            with new_folder(target) as scratch:
                _write(header, scratch)
    return target


def _folder_name(path: Path) -> str:
    """A name with a digest of the file's path, size and time (in whole seconds: archives keep those)."""
    try:
        stat = path.stat()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    if not path.is_file():
        raise StartupError(f"{path} is not a file")
    facts = f"{_VERSION} {path.resolve()} {stat.st_size} {int(stat.st_mtime)}"
    return f"{path.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def _write(header: Any, folder: Path) -> None:
    from headrace_launcher.models import gguf_config, gguf_tokenizer

    _dump(folder / "config.json", gguf_config.config(header))
    _dump(folder / "generation_config.json", gguf_config.generation_config(header))
    gguf_tokenizer.build(header).save(str(folder / "tokenizer.json"))
    _dump(folder / "tokenizer_config.json", gguf_tokenizer.tokenizer_config(header))
    if template := header.metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    for key, template in header.metadata.items():
        name = key.removeprefix(_NAMED_TEMPLATE)
        if name != key and _TEMPLATE_NAME.fullmatch(name) and isinstance(template, str):
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(template, "utf-8")
    os.symlink(header.path.resolve(), folder / GGUF_NAME)


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")
