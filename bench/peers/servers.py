"""A peer's server as a child process group on loopback: started, waited for, stopped with all that it started."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.peers.environments import Unavailable, last_words, own_environment
from tests.processes import free_port

STOP_SECONDS = 10.0
LEAST_MEMORY = 3e9  # bytes that must be free before a server starts
_POLL = 0.05


@dataclass(frozen=True)
class Start:
    """How a server is started. `{port}` in an argument is replaced."""

    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    health: str = "/health"
    seconds: float = 120.0  # until it must have answered


class Server:
    """A running server."""

    def __init__(self, start: Start) -> None:
        """Start it; `wait_ready` waits.

        Raises:
            Unavailable: too little memory is free; a machine that swaps measures nothing.
        """
        free = psutil.virtual_memory().available
        if free < LEAST_MEMORY:
            raise Unavailable(f"only {free / 1e9:.1f} GB of memory are free")
        self._start = start
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        argv = [argument.replace("{port}", str(port)) for argument in start.argv]
        self._began = time.monotonic()
        with open(self._folder / "log", "wb") as log:
            self._popen = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=Path(__file__).parents[2], process_group=0,
                env=own_environment({"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **start.env}),
            )

    def wait_ready(self) -> float:
        """Wait for its first healthy answer; seconds since the start.

        Raises:
            Unavailable: it ended, or took too long.
        """
        while True:
            try:
                with urllib.request.urlopen(self.url + self._start.health, timeout=2):
                    return time.monotonic() - self._began
            except (urllib.error.URLError, OSError, http.client.HTTPException):
                if self._popen.poll() is not None:
                    raise Unavailable(f"its server ended with {self._popen.poll()}: {self._log()}") from None
                if time.monotonic() - self._began > self._start.seconds:
                    raise Unavailable(f"its server is not ready after {self._start.seconds:.0f} s: {self._log()}") from None
                time.sleep(_POLL)

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._popen.pid

    def stop(self) -> None:
        """End it and every process that it started. Again: nothing."""
        if self._popen.returncode is not None and not self._folder.exists():
            return
        members = processes(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        _, left = psutil.wait_procs(members, timeout=STOP_SECONDS)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _log(self) -> str:
        return last_words((self._folder / "log").read_text("utf-8", "replace"))


def processes(pid: int) -> list[psutil.Process]:
    """A process and all below it; none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def memory_mb(pid: int) -> float:
    """Resident memory of a process and all below it, in megabytes; pages that they share count more than once."""
    total = 0
    for process in processes(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 1e6
