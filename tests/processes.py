"""Real processes for tests: a shard alone, and the whole service. Started once for each set of flags."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import IO, Any

import grpc

from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_pb2_grpc as pb_grpc

START = 120.0  # seconds that a start may take on a busy machine
MAIN = ["-c", "from headrace_launcher.cli import main; main()"]  # what python runs as `headrace`
CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Process:
    """A child of the test with its stderr in a file."""

    def __init__(self, module: str, *flags: str, env: dict[str, str] | None = None) -> None:
        self._start(["-m", module, *flags], env)

    def _start(self, argv: list[str], env: dict[str, str] | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
        self._log: IO[bytes] = open(self.folder / "log", "wb")  # noqa: SIM115 - closed in stop
        self.popen = subprocess.Popen(
            [sys.executable, *argv], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        )

    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8", "replace")

    def check_alive(self) -> None:
        assert self.popen.poll() is None, f"ended with {self.popen.poll()}: {self.log()}"

    def stop(self) -> int:
        """SIGTERM, then the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(20)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait(5)
        finally:
            self._log.close()


class Command(Process):
    """`headrace ...` in the background."""

    def __init__(self, *argv: str, env: dict[str, str] | None = None) -> None:
        self._start([*MAIN, *argv], env)


class ShardProcess(Process):
    """`python -m headrace_shard`, and a stub to talk to it."""

    def __init__(self, model_folder: Path, *flags: str, prefix: Path | None = None) -> None:
        prefix = prefix or Path(tempfile.mkdtemp(prefix="headrace-test-")) / "s"
        rank = flags[flags.index("--rank") + 1] if "--rank" in flags else "0"
        self.socket = f"{prefix}-{rank}"
        super().__init__(
            "headrace_shard", "--model-folder", str(model_folder), "--shard-uds-path", str(prefix), *flags
        )
        self.channel = grpc.insecure_channel(f"unix:{self.socket}", options=CHANNEL_OPTIONS)
        self.stub = pb_grpc.GenerationStub(self.channel)

    def wait_ready(self) -> ShardProcess:
        end = time.monotonic() + START
        while True:
            self.check_alive()
            try:
                self.stub.Health(pb.HealthRequest(), timeout=2)
                return self
            except grpc.RpcError:
                assert time.monotonic() < end, self.log()
                time.sleep(0.1)

    def stop(self) -> int:
        self.channel.close()
        return super().stop()


class ShardGroup:
    """The ranks of one shard group; `ranks[0]` leads."""

    def __init__(self, model_folder: Path, world_size: int, *flags: str) -> None:
        prefix = Path(tempfile.mkdtemp(prefix="headrace-test-")) / "s"
        own = ("--num-shard", str(world_size), *flags)
        self.ranks = [ShardProcess(model_folder, "--rank", str(r), *own, prefix=prefix) for r in range(world_size)]

    def wait_ready(self) -> ShardGroup:
        for rank in self.ranks:
            rank.wait_ready()
        return self

    def stop(self) -> list[int]:
        for rank in self.ranks:
            if rank.popen.poll() is None:
                rank.popen.send_signal(signal.SIGTERM)
        return [rank.stop() for rank in self.ranks]


class Service(Process):
    """`headrace serve`, with the address of its router and the socket of its shard."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.prefix = Path(tempfile.mkdtemp(prefix="headrace-test-")) / "s"
        self.socket = f"{self.prefix}-0"
        own = ("--port", str(self.port), "--shard-uds-path", str(self.prefix))
        super().__init__("headrace_launcher", *own, *flags, env=env)

    def wait_ready(self) -> Service:
        end = time.monotonic() + START
        while True:
            self.check_alive()
            if " is served at " in self.log():
                return self
            assert time.monotonic() < end, self.log()
            time.sleep(0.05)

    def metrics(self) -> str:
        """What GET /metrics says."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            return str(reply.read().decode())

    def metric(self, name: str) -> float:
        """Value of a metric without labels."""
        return float(next(line.split()[1] for line in self.metrics().splitlines() if line.split()[0] == name))

    def stub(self) -> Any:
        """A new gRPC stub of the leading shard."""
        return pb_grpc.GenerationStub(grpc.insecure_channel(f"unix:{self.socket}", options=CHANNEL_OPTIONS))
