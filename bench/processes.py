"""Processes that are measured: what they cost, and when they first answer."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from tests.processes import START, Process, free_port

_POLL = 0.01  # seconds


def embedded_model() -> Path:
    """The folder of the default model; fetched if it is not in the cache."""
    command = [sys.executable, "-c", "from headrace_launcher.cli import main; main()", "resolve"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


class ScriptedShard(Process):
    """The tests' shard without a model, whose steps end at absolute deadlines, as a process of its own."""

    def __init__(self, folder: Path, step_ms: float = 1.0, *flags: str) -> None:
        """`folder`: of its socket; `step_ms`: milliseconds from one deadline to the next."""
        self.target = f"unix:{folder}/shard"
        super().__init__("tests.fakes.scripted_shard", "--target", self.target, "--step-ms", str(step_ms), *flags)


class RouterProcess(Process):
    """A router by hand, in front of a shard that runs already."""

    def __init__(self, model_folder: Path, shard_target: str, *flags: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(
            "headrace_router", "--model-folder", str(model_folder), "--shard-target", shard_target, "--port", str(port),
            *flags,
        )

    def wait_ready(self) -> RouterProcess:
        """Wait until it serves."""
        wait_answer(self, f"{self.url}/health")
        return self


def cpu_seconds(pid: int) -> dict[int, float]:
    """CPU time, user and system, of a process and of each that it started, by pid. The dead are left out."""
    process = psutil.Process(pid)
    spent = {}
    for member in (process, *process.children(recursive=True)):
        if member.status() != psutil.STATUS_ZOMBIE:
            times = member.cpu_times()
            spent[member.pid] = times.user + times.system
    return spent


def cpu_between(before: dict[int, float], after: dict[int, float]) -> float:
    """CPU seconds spent between two looks at the same processes.

    Raises:
        RuntimeError: a process has ended or come in between: its time would be missing, and the sum too small.
    """
    if before.keys() != after.keys() or not before:
        raise RuntimeError(f"the processes changed during the measurement: {sorted(before)} before, {sorted(after)} after")
    return sum(after.values()) - sum(before.values())


def rss_mb(pid: int) -> float:
    """Resident memory of one process, in megabytes (10^6 bytes)."""
    return float(psutil.Process(pid).memory_info().rss) / 1e6


def child_of(pid: int, module: str) -> int:
    """The pid of the child that was started with `python -m module`.

    Raises:
        LookupError: there is none.
    """
    for child in psutil.Process(pid).children(recursive=True):
        if module in child.cmdline():
            return child.pid
    raise LookupError(module)


def roofline(log: str) -> float:
    """Tokens per second that reading the weights allows one stream, as the leading shard's line in the log says.

    Raises:
        LookupError: there is no such line: torch serves, or the shard is not ready.
    """
    found = re.search(r"at most ([\d.]+) tokens/s for one stream", log)
    if found is None:
        raise LookupError("the log does not say what the memory allows")
    return float(found[1])


def wait_answer(process: Process, url: str) -> None:
    """Wait until GET url answers 200.

    Raises:
        AssertionError: the process ended, or it took too long.
    """
    end = time.monotonic() + START
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            process.check_alive()
            assert time.monotonic() < end, process.log()
            time.sleep(_POLL)
