"""Reading a model folder's tensors: `WeightSource` hides whether they are safetensors or GGUF."""

from __future__ import annotations

from headrace._common.model_folder import ModelFolder
from headrace_shard.weights.gguf import GgufWeights
from headrace_shard.weights.safetensors import SafetensorsWeights
from headrace_shard.weights.source import Blocks, Dense, WeightSource

__all__ = ["Blocks", "Dense", "WeightSource", "open_weights"]


def open_weights(folder: ModelFolder) -> WeightSource:
    """The folder's weights.

    Raises:
        StartupError: there are none, or a file is damaged; names it.
    """
    if folder.gguf is not None:
        return GgufWeights(folder.gguf, folder)
    return SafetensorsWeights(folder.path)
