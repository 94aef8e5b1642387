"""Brokers of every kind for tests, with a clock that a test moves; the shared one on a real Valkey server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from headrace._common.process import PARENT_ENV
from headrace_launcher import embedded
from headrace_router.network.broker import Broker
from headrace_router.network.jobs import Policy
from headrace_router.network.memory import MemoryBroker
from headrace_router.network.shared import SharedBroker

T = TypeVar("T")
KINDS = ("memory", "shared")


class Valkey:
    """The server of `--broker embedded`, without a launcher."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
        self.url = f"unix://{embedded.socket_of(self.folder)}"
        embedded.prepare(self.folder)
        self.start()

    def start(self) -> None:
        env = {**os.environ, PARENT_ENV: str(os.getpid())}
        self._process = subprocess.Popen(embedded.command(self.folder), env=env)
        end = time.monotonic() + 10
        while not self._answers():
            assert self._process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(self.url.removeprefix("unix://"))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
        return False

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(5)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(5)

    def wipe(self) -> None:
        """Lose everything, as a store without persistence does."""
        self.kill()
        for path in self.folder.glob("appendonlydir/*"):
            path.unlink()
        self.start()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Brokers:
    """Gateways on one broker of a kind, run one step after the other in a loop of their own."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind, self.clock = kind, Clock()
        self._url, self._runner = url, asyncio.Runner()
        self._namespaces = (secrets.token_hex(8) for _ in itertools.count())
        self._made: list[Broker] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def make(self, policy: Policy, gateways: int = 1) -> list[Any]:
        """Brokers of so many gateways that share their jobs; the one in memory is the same for all of them."""
        namespace = next(self._namespaces)
        if self.kind == "memory":
            made: list[Broker] = [MemoryBroker(policy, self.clock)]
        else:
            made = [self.run(self._shared(policy, namespace)) for _ in range(gateways)]
        for broker in made:
            self.run(broker.start(5.0))
        self._made += made
        return made * (gateways // len(made))

    async def _shared(self, policy: Policy, namespace: str) -> Broker:
        return SharedBroker(self._url, policy, namespace, self.clock)

    def drop(self, made: list[Any]) -> None:
        """Be done with some of them."""
        for broker in made:
            if broker in self._made:
                self._made.remove(broker)
                self.run(broker.close("the test ends"))

    def close(self) -> None:
        self.drop(list(self._made))
        self._runner.close()
