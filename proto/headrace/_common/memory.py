"""Giving memory back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def trim_memory() -> None:
    """Return what malloc keeps after large temporary objects; glibc alone has the call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
