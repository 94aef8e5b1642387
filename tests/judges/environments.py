"""Environments of the judges: each has its own packages, pinned, made on first use and kept in the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


class NotAvailable(Exception):
    """The judge cannot be had on this machine; says why."""


def cache() -> Path:
    """The folder of all judges' environments."""
    base = os.environ.get("HEADRACE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    return Path(base) / "judges"


def python(judge: str, *, torch: bool = False) -> Path:
    """The interpreter of a judge's environment. What alone.txt lists is installed without what it depends on. `torch`: it also
    sees the packages of the environment that runs the tests, behind its own.

    Raises:
        NotAvailable: its packages cannot be installed.
    """
    wanted, alone = HERE / judge / "requirements.txt", HERE / judge / "alone.txt"
    folder = _folder(judge, wanted.read_bytes() + (alone.read_bytes() if alone.exists() else b""))
    made = folder / "bin/python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        if torch:
            site = next(folder.glob("lib/python*/site-packages"))
            (site / "behind.pth").write_text(f"{_own_site()}\n", "utf-8")
        install = [str(made), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*install, "-r", str(wanted)])
        if alone.exists():
            _run([*install, "--no-deps", "-r", str(alone)])
        (folder / "complete").touch()
    return made


def node(judge: str) -> Path:
    """The folder with a judge's node_modules.

    Raises:
        NotAvailable: there is no npm, or its packages cannot be installed.
    """
    if shutil.which("npm") is None:
        raise NotAvailable("npm is not installed (Debian: apt install npm)")
    wanted = HERE / judge / "package.json"
    folder = _folder(judge, wanted.read_bytes())
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(wanted, folder)
        _run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)])
        (folder / "complete").touch()
    return folder


def _folder(judge: str, content: bytes) -> Path:
    key = hashlib.sha256(content + sys.version.encode() + sys.prefix.encode()).hexdigest()[:16]
    return cache() / f"{judge}-{key}"


def _own_site() -> Path:
    import numpy

    return Path(numpy.__file__).parents[1]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise NotAvailable(f"{Path(command[0]).name} {command[2] if len(command) > 2 else ''}: {lines[-1]}")
