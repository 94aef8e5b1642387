"""What a child of the launcher does so that it never outlives it, and has as many connections as it may."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

PARENT_ENV = "HEADRACE_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent(cleanup: Callable[[], None]) -> None:
    """End this process, after `cleanup`, as soon as the launcher that started it is gone.

    Call it first thing in the main thread. A process that nobody spawned (no HEADRACE_PARENT_PID) is left alone.
    The kernel's signal is the fast way; the watching thread covers what it misses: PR_SET_PDEATHSIG is lost when the
    parent dies before the call, and an orphan may fall to any subreaper, so that only the parent's own pid tells.
    """
    expected = int(os.environ.get(PARENT_ENV, "0"))
    if not expected:
        return

    def end(*_: object) -> None:
        with contextlib.suppress(OSError):
            cleanup()
        os._exit(1)

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(0.25)
        end()

    signal.signal(signal.SIGHUP, end)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def allow_open_files() -> None:
    """Raise the soft limit of open files to the hard one: a stream is an open file, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems refuse what they call unlimited
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
