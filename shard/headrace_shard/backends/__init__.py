"""Device backends: a handful of fused operations a layer, behind one interface (`base.Backend`)."""

from __future__ import annotations

import torch

from headrace_shard.backends.base import Backend
from headrace_shard.backends.onednn_backend import OneDnnBackend
from headrace_shard.backends.torch_backend import TorchBackend
from headrace_shard.parallel.group import Group


def choose_backend(dtype: torch.dtype, device: torch.device, group: Group) -> Backend:
    """The fastest backend for this data type and device; chosen once, at start."""
    return (OneDnnBackend if OneDnnBackend.available(dtype, device) else TorchBackend)(dtype, device, group)
