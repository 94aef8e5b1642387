"""Device backends: a handful of fused operations a layer, behind one interface (`base.Backend`)."""

from __future__ import annotations

import logging

import torch

from headrace._common.errors import StartupError
from headrace_shard.backends.base import Backend
from headrace_shard.backends.cpu_backend import CpuBackend
from headrace_shard.backends.onednn_backend import OneDnnBackend
from headrace_shard.backends.torch_backend import TorchBackend
from headrace_shard.kernels.build import BuildFailed
from headrace_shard.kernels.library import Library
from headrace_shard.parallel.group import Group
from headrace_shard.weights.precision import Precision

log = logging.getLogger(__name__)


def choose_backend(precision: Precision, device: torch.device, group: Group, threads: int = 1, isa: str = "") -> Backend:
    """The fastest backend for this precision and device; chosen once, at start.

    `isa`: the highest instruction set that the CPU kernels may use; "" for the best that this CPU has.

    Raises:
        StartupError: this device cannot hold matrices so.
    """
    plain = torch.float32 if device.type == "cpu" else torch.bfloat16
    if device.type == "cpu":
        try:
            library = Library(isa)
        except BuildFailed as error:
            if precision.at_most:
                raise StartupError(f"--quantize needs the CPU kernels: {error}") from None
            log.warning("%s: torch serves instead of the CPU kernels, several times slower", error)
        else:
            log.info("CPU kernels: %s, %d thread%s", library.variant, threads, "s" * (threads != 1))
            torch.set_num_threads(1)  # two pools of threads would fight for the cores
            return CpuBackend(group, library, threads, precision)
    elif precision.at_most:
        raise StartupError(f"--quantize is for the CPU; {device.type} serves weights in 16 or 32 bits")
    dtype = getattr(torch, precision.asked.label) if precision.asked is not None else plain
    torch.set_num_threads(threads)
    return (OneDnnBackend if OneDnnBackend.available(dtype, device) else TorchBackend)(dtype, device, group)
