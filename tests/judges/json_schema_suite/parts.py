"""What these judges need from outside: the suite's schemas from npm, and an environment with a second grammar engine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
PACKAGE = "json-schema-test-suite@0.0.10"


def cache(name: str) -> Path:
    """A folder that outlives the run."""
    base = os.environ.get("HEADRACE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    folder = Path(base) / "judges" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, schema) of every case of the suite's draft 4, fetched on first use."""
    folder = cache(PACKAGE)
    if not (folder / "package").is_dir():
        command = ["npm", "pack", "--silent", PACKAGE]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        with tarfile.open(folder / done.stdout.splitlines()[-1]) as archive:
            archive.extractall(folder, filter="data")
    for path in sorted((folder / "package/tests/draft4").rglob("*.json")):
        for case in json.loads(path.read_text("utf-8")):
            yield f"{path.stem}: {case['description']}", case["schema"]


def python() -> Path:
    """The interpreter of the environment with the second engine, made on first use."""
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode() + sys.prefix.encode()).hexdigest()[:16]
    folder = cache(f"xgrammar-{wanted}")
    made = folder / "bin/python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(made), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS)]
        subprocess.run(install, check=True)
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "torch-of-the-tests.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n", "utf-8")
        (folder / "complete").touch()
    return made
