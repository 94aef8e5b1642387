"""Headrace serves large language models.

This module imports nothing, so that `from headrace.v1 import generation_pb2` stays cheap and free of torch;
the public names below are resolved when they are first asked for.
"""

__version__ = "0.1.0"

_LAZY = {"Intermediate": "headrace._common.intermediate", "Token": "headrace._common.intermediate"}

__all__ = ["Intermediate", "Token", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
