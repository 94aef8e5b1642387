"""A worker network of real processes: a gateway without shards, and workers that can be killed, frozen and replaced."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.processes import START, Process, Service


def workers(url: str) -> dict[str, Any]:
    """What a gateway's GET /v1/workers says."""
    with urllib.request.urlopen(f"{url}/v1/workers", timeout=10) as reply:
        shown: dict[str, Any] = json.loads(reply.read())
    return shown


def send_all(process: Process, number: signal.Signals, what: str = "") -> float:
    """A signal to a process and all that it has started, as when their machine is lost or stands still, or only to those
    whose command names `what`; returns the time.monotonic() at which all had it.
    """
    first = psutil.Process(process.popen.pid)
    for member in [*first.children(recursive=True), first]:
        if what in " ".join(member.cmdline()):
            os.kill(member.pid, number)
    return time.monotonic()


class Worker(Process):
    """`headrace worker` on a model."""

    def __init__(self, model: Path, gateway: str, token_file: Path, *flags: str) -> None:
        """`gateway`: its http URL."""
        prefix = Path(tempfile.mkdtemp(prefix="headrace-test-")) / "s"
        super().__init__(
            "headrace_launcher", "--model-id", str(model), "--gateway", gateway.replace("http", "ws"), "--port", "0",
            "--worker-token-file", str(token_file), "--shard-uds-path", str(prefix), *flags,
        )

    @property
    def url(self) -> str:
        """Of its own API; it has one when it says so, which may be after it has joined."""
        end = time.monotonic() + START
        while not (found := re.findall(r"is served at (\S+)", self.log())):
            self.check_alive()
            assert time.monotonic() < end, self.log()
            time.sleep(0.05)
        return str(found[0])

    def send(self, number: signal.Signals, what: str = "") -> float:
        """A signal to each of its processes, or only to those whose command names `what`; returns time.monotonic()."""
        return send_all(self, number, what)


class Network:
    """One gateway and its workers."""

    def __init__(self, model: Path, folder: Path, gateway: tuple[str, ...] = (), worker: tuple[str, ...] = ()) -> None:
        """`folder`: for the workers' token; `gateway`, `worker`: flags."""
        self.model, self.token_file, self._flags = model, folder / "worker.token", worker
        self.gateway = Service(
            "--model-id", str(model), "--role", "gateway", "--worker-token-file", str(self.token_file), *gateway
        )
        self.url = self.gateway.url
        self._ends_with = 0
        self.workers: list[Worker] = []

    def __enter__(self) -> Network:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self, count: int) -> Network:
        """Wait for the gateway, then for so many workers."""
        self.gateway.wait_ready()
        self.add(count)
        return self

    def add(self, count: int) -> list[Worker]:
        """More workers, once they have joined."""
        before = self.sessions()  # a lost one may be among them for a while
        made = [Worker(self.model, self.url, self.token_file, *self._flags) for _ in range(count)]
        self.workers += made
        end = time.monotonic() + START
        while len(self.sessions() - before) < count:
            for worker in made:
                worker.check_alive()
            assert time.monotonic() < end, made[-1].log()
            time.sleep(0.1)
        return made

    def kill(self, worker: Worker) -> float:
        """As when the plug of its machine is pulled; returns time.monotonic()."""
        self.workers.remove(worker)
        at = worker.send(signal.SIGKILL)
        worker.stop()
        return at

    def kill_gateway(self) -> float:
        """The same with the gateway's."""
        self._ends_with = -signal.SIGKILL
        return send_all(self.gateway, signal.SIGKILL)

    def sessions(self) -> set[str]:
        """The ids of those who are connected."""
        return {worker["session"] for worker in self.show()["workers"]}

    def show(self) -> dict[str, Any]:
        """What GET /v1/workers says."""
        return workers(self.url)

    def stop(self) -> None:
        """Everything ends, the gateway well unless it was killed."""
        for worker in self.workers:
            if worker.popen.poll() is None:
                worker.send(signal.SIGCONT)
                worker.popen.send_signal(signal.SIGTERM)
        for worker in self.workers:
            worker.stop()
        assert self.gateway.stop() == self._ends_with
