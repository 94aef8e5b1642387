"""Private folders (0700) that vanish with the process, and the cache.

Each private folder holds a file `lock` that its process keeps locked. A folder whose lock can be taken belongs to a
process that was killed; the next start removes it. (A lock, not a pid: containers that share a folder have equal pids.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace._common.errors import StartupError

PREFIX = "headrace-"
_LOCK = "lock"


@contextlib.contextmanager
def private_folder(base: str) -> Iterator[Path]:
    """A new folder under `base`, removed at the end; left-over ones of killed processes go first.

    Raises:
        StartupError: `base` is not writable.
    """
    remove_stale(base)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    except OSError as error:
        raise StartupError(f"cannot make a folder in {base}: {error.strerror}; set TMPDIR to a writable one") from None
    try:
        with open(folder / "lock.new", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(folder / "lock.new", folder / _LOCK)  # seen only when it is locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(base: str) -> None:
    """Remove this user's private folders in `base` whose process is gone."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            ours = entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False)
            if ours and entry.stat().st_uid == os.getuid():
                _remove_if_stale(Path(entry.path))


def _remove_if_stale(folder: Path) -> None:
    try:
        with open(folder / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # not one of ours, or in use
        return


def run_base() -> str:
    """Where sockets go: $XDG_RUNTIME_DIR if it is a writable folder, else the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK | os.X_OK):
        return runtime
    return tempfile.gettempdir()


@dataclass(frozen=True)
class Cache:
    """Where downloaded and converted models lie. It may be read-only as long as nothing new is needed."""

    root: Path
    writable: bool

    @property
    def models(self) -> Path:
        return self.root / "models"


def cache_root() -> Path | None:
    """$HEADRACE_CACHE, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace; None without any of the three."""
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser().absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).absolute() / "headrace"
    home = os.environ.get("HOME")
    return Path(home).absolute() / ".cache/headrace" if home else None


class CacheProvider:
    """Opens the cache; where it cannot be written, a private folder takes its place when something must be."""

    def __init__(self, stack: contextlib.ExitStack, warn: Callable[[str], None]) -> None:
        self._stack, self._warn = stack, warn
        self._private: Cache | None = None
        root = cache_root()
        self.cache = Cache(root, _make(root / "models")) if root else None

    def readable(self) -> list[Cache]:
        """The caches to look into for what is there already."""
        return [cache for cache in (self.cache, self._private) if cache is not None]

    def writable(self) -> Cache:
        """A cache to put something new into."""
        if self.cache is not None and self.cache.writable:
            return self.cache
        if self._private is None:
            why = f"the cache {self.cache.root} is not writable" if self.cache else "there is no home folder"
            self._warn(f"{why}: this run uses a temporary folder for models; HEADRACE_CACHE names one to keep them in")
            folder = self._stack.enter_context(private_folder(tempfile.gettempdir()))
            (folder / "models").mkdir()
            self._private = Cache(folder, True)
        return self._private


def _make(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@contextlib.contextmanager
def locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file, so that two starts do not download or convert the same model at once."""
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that prepares the same model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` in one rename when the block ends well, and is removed when it does not."""
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        if not target.exists():
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
