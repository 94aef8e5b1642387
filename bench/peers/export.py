"""A GGUF's model folder as float32 safetensors, for peers that read no GGUF: `python -m bench.peers.export SOURCE TARGET`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace._common.model_folder import ModelFolder
from headrace_shard.weights.gguf import GgufWeights, gguf_name

_COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def export(source: Path, target: Path) -> None:
    """Write `target`, an existing folder."""
    folder = ModelFolder.open(source)
    if folder.gguf is None:
        raise ValueError(f"{source} has no GGUF file")
    weights = GgufWeights(folder.gguf, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(weights.names()):
        tensors[name] = weights.get(name, weights.entries[gguf_name(name)].shape).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for name in _COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.peers.export", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    export(given.source, given.target)
