"""One child process: how it is started, how its output is relayed, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

from headrace._common.process import PARENT_ENV

_READ = 65536
_LONGEST_LINE = 1 << 20
_ERROR = re.compile(r"(?:ERROR|CRITICAL|error:)\s*(.*)")
_TIMES = re.compile(r"ready: (import [\d.]+ s, load [\d.]+ s, warm-up [\d.]+ s)")


class Child:
    """A running child. Its lines go to the launcher's stderr, with its name in front or as JSON."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, as_json: bool) -> None:
        self.name = name
        self.process = process
        self.startup_times: str | None = None  # from its "ready" line
        self.freeze_note: str | None = None  # why the launcher itself has killed it
        self._as_json = as_json
        self._last_error: str | None = None
        self._last_line: str | None = None
        self.ended: asyncio.Task[int] = asyncio.create_task(self._run())

    @classmethod
    async def start(cls, name: str, command: list[str], env: dict[str, str], as_json: bool) -> Child:
        """Spawn it from the main thread (the kernel ties its life to the spawning thread), in its own process group."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**env, PARENT_ENV: str(os.getpid())}, process_group=0,
        )
        return cls(name, process, as_json)

    @property
    def alive(self) -> bool:
        return not self.ended.done()

    def describe_end(self) -> str:
        """How it ended, with its last error line."""
        status = self.process.returncode
        if status is not None and status < 0:
            how, why = f"{self.name} was killed by {signal.Signals(-status).name}", self.freeze_note or self._last_error
        elif status == 0 and not self._last_error:
            how, why = f"{self.name} ended with status 0, which nobody had asked for", None
        else:
            how, why = f"{self.name} ended with status {status}", self._last_error or self._last_line
        return f"{how}: {why}" if why else how

    def send(self, number: signal.Signals) -> None:
        """Signal the child alone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the child and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self, seconds: float) -> bool:
        """SIGTERM, then SIGKILL after `seconds`; returns whether it ended by itself."""
        self.send(signal.SIGTERM)
        done, _ = await asyncio.wait({self.ended}, timeout=seconds)
        self.kill()
        await self.ended
        return bool(done)

    async def _run(self) -> int:
        """Relay until the process has ended and its output was read."""
        relay = asyncio.create_task(self._relay())
        status = await self.process.wait()
        with contextlib.suppress(TimeoutError):  # a grandchild may hold the pipe open
            await asyncio.wait_for(relay, 1.0)
        return status

    async def _relay(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        while data := await self.process.stdout.read(_READ):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._line(line)
            if len(rest) > _LONGEST_LINE:
                self._line(rest)
                rest = b""
        if rest:
            self._line(rest)

    def _line(self, data: bytes) -> None:
        line = data.decode("utf-8", "replace").rstrip()
        if not line:
            return
        message, level = _message(line)
        self._last_line = message
        if level in ("ERROR", "CRITICAL"):
            self._last_error = message
        if match := _TIMES.search(message):
            self.startup_times = match[1]
        if not self._as_json:
            emit(f"[{self.name}] {line}")
        elif line.startswith("{") and level:
            emit(line)
        else:
            emit(json_line(level or "INFO", self.name, message))


def _message(line: str) -> tuple[str, str | None]:
    """(message, level) of a log line, plain or JSON; the level is None where there is none."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            return str(entry["message"]), str(entry["level"])
    if match := _ERROR.match(line):
        return match[1], "ERROR"
    return line, None


def json_line(level: str, process: str, message: str, **more: object) -> str:
    """A log line in the form of `headrace._common.logs.JsonFormatter`."""
    now = time.time()
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    stamp = f"{seconds}.{int(now % 1 * 1000):03d}Z"
    entry = {"timestamp": stamp, "level": level, "process": process, "message": message, **more}
    return json.dumps(entry, ensure_ascii=False)


def emit(line: str) -> None:
    """Write one line to stderr; a closed stderr silences the logs but does not stop the service."""
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
