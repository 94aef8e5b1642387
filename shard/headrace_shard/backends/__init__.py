"""Device backends: a handful of fused operations a layer, behind one interface (`base.Backend`)."""

from __future__ import annotations

import logging

import torch

from headrace_shard.backends.base import Backend
from headrace_shard.backends.cpu_backend import CpuBackend
from headrace_shard.backends.onednn_backend import OneDnnBackend
from headrace_shard.backends.torch_backend import TorchBackend
from headrace_shard.kernels.build import BuildFailed
from headrace_shard.kernels.library import Library
from headrace_shard.parallel.group import Group

log = logging.getLogger(__name__)


def choose_backend(
    dtype: torch.dtype, device: torch.device, group: Group, threads: int = 1, own_weights: bool = False
) -> Backend:
    """The fastest backend for this data type and device; chosen once, at start.

    `own_weights`: quantized weights may stay as they are, if the backend can (it names their `kinds` then).
    """
    if device.type == "cpu" and dtype == torch.float32:
        try:
            library = Library()
        except BuildFailed as error:
            log.warning("%s: torch serves instead of the CPU kernels, several times slower", error)
        else:
            torch.set_num_threads(1)  # two pools of threads would fight for the cores
            return CpuBackend(group, library, threads, own_weights)
    torch.set_num_threads(threads)
    return (OneDnnBackend if OneDnnBackend.available(dtype, device) else TorchBackend)(dtype, device, group)
