"""A child ends with the parent that spawned it, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace._common.process import PARENT_ENV

CHILD = """
import sys, time
from pathlib import Path
from headrace._common.process import die_with_parent
here = Path(sys.argv[1])
time.sleep(float(sys.argv[2]))
die_with_parent(lambda: (here / "cleaned").touch())
(here / "ready").touch()
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1], *sys.argv[2:]], env={**os.environ, "HEADRACE_PARENT_PID": str(os.getpid())}
)
print(child.pid, flush=True)
time.sleep(60)
"""


def gone(pid: int) -> bool:
    """A process that has ended, though nobody may have collected it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait(condition: str, pid: int, path: Path, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not (gone(pid) if condition == "gone" else path.exists()):
        assert time.monotonic() < deadline, f"not {condition} in {seconds} s"
        time.sleep(0.02)


def start(folder: Path, delay: float) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", PARENT, CHILD, str(folder), str(delay)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_takes_its_child_along(tmp_path: Path, number: int) -> None:
    parent, child = start(tmp_path, 0.0)
    wait("ready", child, tmp_path / "ready")
    parent.send_signal(number)
    parent.wait()
    wait("gone", child, tmp_path)
    assert (tmp_path / "cleaned").exists()


def test_a_parent_that_is_gone_before_the_child_looks(tmp_path: Path) -> None:
    parent, child = start(tmp_path, 0.5)
    parent.kill()
    parent.wait()
    wait("gone", child, tmp_path)
    assert (tmp_path / "cleaned").exists()


def test_a_process_that_nobody_spawned_stays(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != PARENT_ENV}
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), "0"], env=env)
    try:
        wait("ready", child.pid, tmp_path / "ready")
        time.sleep(0.6)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    assert not (tmp_path / "cleaned").exists()


def test_the_limit_of_open_files_is_raised() -> None:
    code = (
        "import resource as r; from headrace._common.process import allow_open_files\n"
        "most = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, most)); allow_open_files()\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (most, most)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
