"""Makes one shard process fail from within. Python imports this by itself where its folder is on PYTHONPATH.

HEADRACE_TEST_FAULT is RANK:KIND. "load": no more memory while the model loads. "raise", "hang", "exit": in the first
step after the file HEADRACE_TEST_TRIGGER exists.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def this_rank() -> str | None:
    argv = sys.orig_argv
    return argv[argv.index("--rank") + 1] if "headrace_shard" in argv and "--rank" in argv else None


def break_steps(kind: str, trigger: str) -> None:
    import time

    from headrace_shard.models.llama import LlamaModel

    forward = LlamaModel.forward

    def failing(self: Any, step: Any) -> Any:
        if os.path.exists(trigger):
            if kind == "raise":
                raise RuntimeError("a fault that a test asked for")
            if kind == "exit":
                os._exit(7)
            time.sleep(1000)
        return forward(self, step)

    LlamaModel.forward = failing  # type: ignore[method-assign]


def break_loading() -> None:
    import resource

    from headrace_shard.backends.torch_backend import TorchBackend

    zeros = TorchBackend._zeros

    def failing(self: Any, size: tuple[int, ...], *more: Any) -> Any:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28,) * 2)
        return zeros(self, (size[0] * 10000, *size[1:]), *more)

    TorchBackend._zeros = failing  # type: ignore[method-assign, assignment]


fault_rank, _, fault_kind = os.environ.get("HEADRACE_TEST_FAULT", "").partition(":")
if fault_kind and this_rank() == fault_rank:
    if fault_kind == "load":
        break_loading()
    else:
        break_steps(fault_kind, os.environ["HEADRACE_TEST_TRIGGER"])
