"""Models of the Hugging Face hub."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from headrace._common.errors import StartupError
from headrace_launcher.private import CacheProvider

# Only what a model folder needs: no pickles, no exports for other engines.
FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
SUBFOLDERS = ["*/*"]


def download(
    model_id: str, revision: str | None, hub_cache: str | None, caches: CacheProvider, say: Callable[[str], None],
    weights: bool = True,
) -> Path:
    """The snapshot folder of a hub model. Its name is the commit.

    Raises:
        StartupError: no such model or revision, no access, or no network and not cached.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import constants, errors, snapshot_download

    folder = hub_cache or constants.HF_HUB_CACHE
    what = f"{model_id}@{revision}" if revision else model_id
    if not _usable(Path(folder)):
        if hub_cache:
            raise StartupError(f"--huggingface-hub-cache {hub_cache} is not a folder that can be written")
        folder = str(caches.writable().root / "hub")
    say(f"looking for {what} on the hub")
    try:
        return Path(snapshot_download(
            model_id, revision=revision, cache_dir=folder, ignore_patterns=SUBFOLDERS,
            allow_patterns=FILES if weights else FILES[1:],
        ))
    except errors.GatedRepoError:
        raise StartupError(f"{what} is gated: ask for access on its page and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise StartupError(f"{model_id} has no revision {revision}") from None
    except errors.RepositoryNotFoundError:
        raise StartupError(f"no model {model_id} on the hub and no such folder here, or HF_TOKEN is needed") from None
    except errors.LocalEntryNotFoundError:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise StartupError(
            f"{what} is not cached and {offline}: put its config.json, tokenizer.json and *.safetensors into a folder "
            "and give that as --model-id"
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise StartupError(f"cannot download {what}: {' '.join(str(error).split())}") from None


def _usable(folder: Path) -> bool:
    """Whether the cache can be written, or holds models that can be read."""
    if any(folder.glob("models--*")):
        return True
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
