"""From --model-id to a model folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace._common.errors import StartupError
from headrace_launcher.models import embedded, folder, gguf_file, hub
from headrace_launcher.private import CacheProvider

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Resolved:
    """A model folder, the name that it is served under, and the commit or checksum that tells its version."""

    folder: Path
    name: str
    sha: str | None


def resolve(
    model_id: str, revision: str | None, hub_cache: str | None, caches: CacheProvider, say: Callable[[str], None],
    weights: bool = True,
) -> Resolved:
    """Find, download or convert the model. `say` gets a line of progress now and then. Without `weights` a folder or a hub
    model need not have any, and none are downloaded; GGUF files are always whole, since their tokenizer is within.

    Raises:
        StartupError: there is no such model, or it cannot be served; one line that names the file or folder at fault.
    """
    try:
        return _resolve(model_id, revision, hub_cache, caches, say, weights)
    except OSError as error:  # no right to look, a full disk
        where = error.filename or model_id or embedded.NAME
        raise StartupError(f"cannot prepare {model_id or embedded.NAME}: {where}: {error.strerror}") from None


def _resolve(
    model_id: str, revision: str | None, hub_cache: str | None, caches: CacheProvider, say: Callable[[str], None],
    weights: bool = True,
) -> Resolved:
    path = Path(model_id).expanduser().absolute() if model_id else Path()
    if revision is not None and (not model_id or path.exists() or not _is_hub_id(model_id)):
        given = repr(model_id) if model_id else "the default model"
        raise StartupError(f"--revision {revision} needs a hub id as --model-id, not {given}")
    if not model_id or (model_id == embedded.NAME and not path.exists()):
        return Resolved(embedded.resolve(caches, say), embedded.NAME, embedded.GGUF_SHA256)
    if path.is_dir():
        return Resolved(folder.resolve(path, caches, say, weights), model_id, None)
    if model_id.lower().endswith(".gguf"):
        return Resolved(gguf_file.resolve(path, caches, say), path.stem, None)
    if path.exists():
        raise StartupError(f"{model_id} is neither a model folder nor a .gguf file")
    if not _is_hub_id(model_id):
        raise StartupError(
            f"{model_id} does not exist: give a folder with config.json and *.safetensors, a .gguf file, or a hub id"
        )
    snapshot = hub.download(model_id, revision, hub_cache, caches, say, weights)
    return Resolved(folder.resolve(snapshot, caches, say, weights), model_id, snapshot.name)


def _is_hub_id(text: str) -> bool:
    return bool(_HUB_ID.fullmatch(text)) and not text.startswith((os.sep, ".", "~"))
