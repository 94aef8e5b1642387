"""Rotary frequencies from a config, in the variants that checkpoints use."""

from __future__ import annotations

import math
from typing import Any

import torch

from headrace._common.errors import StartupError


def inverse_frequencies(config: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions: [head_dim / 2], float32.

    Both spellings are read: `rope_theta` with `rope_scaling`, and `rope_parameters`.

    Raises:
        StartupError: a rope type that is not known here.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(plain, scaling)
    raise StartupError(f"rope type {kind!r} in the config is not supported; known: default, linear, llama3")


def _llama3(plain: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, window = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / plain
    smooth = ((window / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain
