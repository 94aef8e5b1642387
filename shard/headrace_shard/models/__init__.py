"""The model families that a shard serves: one file each, found by the config's `model_type`."""

from __future__ import annotations

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_shard.backends.base import Backend
from headrace_shard.models.base import Model
from headrace_shard.models.llama import LlamaModel
from headrace_shard.weights import WeightSource

FAMILIES: dict[str, type[Model]] = {"llama": LlamaModel, "mistral": LlamaModel, "qwen2": LlamaModel}


def family_of(folder: ModelFolder) -> type[Model]:
    """The class that serves this folder's model.

    Raises:
        StartupError: no family of that model_type; names it and the known ones.
    """
    model_type = str(folder.text_config.get("model_type", ""))
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise StartupError(f"model_type {model_type!r} of {folder.path / 'config.json'} is not supported; known: {known}")
    return FAMILIES[model_type]


def load_model(folder: ModelFolder, weights: WeightSource, backend: Backend, rank: int = 0, world_size: int = 1) -> Model:
    """The folder's model, or one rank's part of it, with its weights packed for the backend."""
    return family_of(folder)(folder.text_config, weights, backend, rank, world_size)


__all__ = ["Model", "family_of", "load_model"]
