"""Real processes for tests: a shard alone, and the whole service. Started once for each set of flags."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

import grpc

from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_pb2_grpc as pb_grpc

START = 120.0  # seconds that a start may take on a busy machine
CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Process:
    """A child of the test with its stderr in a file."""

    def __init__(self, module: str, *flags: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
        self._log: IO[bytes] = open(self.folder / "log", "wb")  # noqa: SIM115 - closed in stop
        self.popen = subprocess.Popen(
            [sys.executable, "-m", module, *flags], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
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


class ShardProcess(Process):
    """`python -m headrace_shard`, and a stub to talk to it."""

    def __init__(self, model_folder: Path, *flags: str) -> None:
        prefix = Path(tempfile.mkdtemp(prefix="headrace-test-")) / "s"
        self.socket = f"{prefix}-0"
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


class Service(Process):
    """`headrace serve`, with the address of its router and the socket of its shard."""

    def __init__(self, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        prefix = Path(tempfile.mkdtemp(prefix="headrace-test-")) / "s"
        self.socket = f"{prefix}-0"
        super().__init__("headrace_launcher", "--port", str(self.port), "--shard-uds-path", str(prefix), *flags)

    def wait_ready(self) -> Service:
        end = time.monotonic() + START
        while True:
            self.check_alive()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return self
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < end, self.log()
                time.sleep(0.1)

    def metric(self, name: str) -> float:
        """Value of a metric without labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.split()[0] == name))

    def stub(self) -> Any:
        """A new gRPC stub of the leading shard."""
        return pb_grpc.GenerationStub(grpc.insecure_channel(f"unix:{self.socket}", options=CHANNEL_OPTIONS))
