"""`headrace doctor`: what a server needs, one line each. Torch is asked in a child process, like everything heavy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from headrace import __version__
from headrace._common.errors import StartupError
from headrace_launcher import sockets
from headrace_launcher.models import embedded
from headrace_launcher.private import cache_root

_TORCH = (
    "import torch; c = torch.cuda; "
    "device = c.get_device_name(0) if c.is_available() else f'CPU, {torch.get_num_threads()} threads'; "
    "print(torch.__version__, '-', device)"
)
_NEEDED = 2_000_000_000  # bytes of memory that the default model is comfortable with


@dataclass(frozen=True)
class Finding:
    """One line. `level` is ok, note (works, but worth knowing) or fail."""

    level: str
    subject: str
    text: str


def run(port: int) -> int:
    """Print every finding; 1 if one is a failure."""
    status = 0
    for finding in findings(port):
        print(f"{finding.level:5} {finding.subject:12} {finding.text}", flush=True)
        status |= finding.level == "fail"
    return status


def findings(port: int) -> Iterator[Finding]:
    """Check one thing after the other."""
    python = f"{platform.python_version()} at {sys.executable}"
    yield Finding("ok" if sys.version_info >= (3, 11) else "fail", "python", python)
    yield _torch()
    yield _compiler()
    yield _memory()
    yield _port(port)
    yield _cache()


def runtime_information() -> list[str]:
    """Versions and machine, for bug reports."""
    lines = [f"headrace {__version__}", f"python {platform.python_version()} ({platform.platform()})"]
    for name in ("torch", "transformers", "tokenizers", "grpcio", "aiohttp"):
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} not installed")
    lines.append(f"{os.cpu_count()} CPUs, {_total_memory() / 1e9:.1f} GB of memory")
    return lines


def _torch() -> Finding:
    try:
        run = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=120, check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Finding("fail", "torch", "importing it took more than 120 s")
    if run.returncode:
        return Finding("fail", "torch", (run.stderr.strip().splitlines() or ["cannot be imported"])[-1])
    return Finding("ok", "torch", run.stdout.strip())


def _compiler() -> Finding:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        return Finding("note", "compiler", "none: kernels of our own cannot be built (Debian: apt install g++)")
    return Finding("ok", "compiler", found)


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory() -> Finding:
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    text = f"{_total_memory() / 1e9:.1f} GB, {free / 1e9:.1f} GB free"
    return Finding("ok" if _total_memory() >= _NEEDED else "note", "memory", text)


def _port(port: int) -> Finding:
    try:
        sockets.check_port("127.0.0.1", port, "--port")
    except StartupError as error:
        return Finding("fail", "port", str(error))
    return Finding("ok", "port", f"{port} is free")


def _cache() -> Finding:
    root = cache_root()
    if root is None:
        return Finding("note", "model cache", "no home folder: models go to a temporary folder at each start")
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("note", "model cache", f"{root} is not writable: models go to a temporary folder at each start")
    state = "has" if (root / "models" / embedded.FILE).is_file() else "does not have"
    return Finding("ok", "model cache", f"{root} {state} the default model")
