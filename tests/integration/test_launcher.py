"""The launcher with its real children on a tiny model: start, ready line, drain, deaths, and nothing left behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace._common.process import PARENT_ENV
from tests.models import write_tiny_model

START = 90.0  # seconds that a start may take on a busy machine


class Launched:
    """`headrace serve` as a child of the test, with its output in files."""

    def __init__(self, folder: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.out, self.err = folder / "out", folder / "err"
        self.tmp = folder / "tmp"
        self.tmp.mkdir(exist_ok=True)
        full = {**os.environ, "TMPDIR": str(self.tmp), "XDG_RUNTIME_DIR": "", **(env or {})}
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace_launcher", *flags], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=full, start_new_session=True,
            )

    def wait_ready(self) -> str:
        """The ready line."""
        wait_for(lambda: self.out.read_text().endswith("\n") or self.process.poll() is not None, START)
        assert self.process.poll() is None, self.err.read_text()
        return self.out.read_text()

    def children(self) -> dict[str, int]:
        """Pids by module."""
        found = {}
        for process in psutil.process_iter(["pid", "ppid", "cmdline"]):
            argv = process.info["cmdline"] or []
            if process.info["ppid"] == self.process.pid and "-m" in argv:
                found[argv[argv.index("-m") + 1]] = process.info["pid"]
        return found

    def wait_child(self, module: str) -> int:
        wait_for(lambda: module in self.children(), 30)
        return self.children()[module]

    def end(self, seconds: float = 30) -> tuple[int, str]:
        """(exit status, last line on stderr), after a check that nothing is left."""
        status = self.process.wait(seconds)
        wait_for(lambda: not orphans(self.process.pid), 5)
        assert list(self.tmp.iterdir()) == []
        return status, self.err.read_text().splitlines()[-1]


def orphans(launcher: int) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if process.environ().get(PARENT_ENV) == str(launcher) and process.pid != launcher:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_for(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=4096)


@pytest.fixture
def launch(model: Path, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    made: list[Launched] = []

    def start(*flags: str, model_id: str | Path = model, port: int | None = None, **more: Any) -> Launched:
        argv = ("--model-id", str(model_id), "--port", str(port or free_port()), "--threads", "1", *flags)
        made.append(Launched(tmp_path, *argv, **more))
        return made[-1]

    yield start
    for launched in made:
        pids = [launched.process.pid, *launched.children().values()]
        if launched.process.poll() is None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        launched.process.wait()


def stream(port: int, tokens: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    parameters = {"max_new_tokens": tokens, "ignore_eos": True}
    body = json.dumps({"inputs": "Tell", "parameters": parameters})
    connection.request("POST", "/generate_stream", body, {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def test_start_serve_and_drain(launch: Callable[..., Launched]) -> None:
    port = free_port()
    server = launch("--api-key", "s3cret", "--json-output", port=port, env={"API_KEY": "another"})
    line = json.loads(server.wait_ready())
    assert line["url"] == f"http://127.0.0.1:{port}"
    assert all(word in line["message"] for word in ("import", "load", "warm-up", "router"))
    assert sorted(server.children()) == ["headrace_router", "headrace_shard"]
    for pid in server.children().values():
        argv = psutil.Process(pid).cmdline()
        assert "s3cret" not in " ".join(argv)
        assert os.getpgid(pid) == pid
        assert os.getsid(pid) == server.process.pid
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for key, status in (("s3cret", 200), ("another", 401)):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", "/generate", '{"inputs": "a", "parameters": {"max_new_tokens": 1}}', headers)
        response = connection.getresponse()
        response.read()
        assert response.status == status
    connection.close()
    server.process.send_signal(signal.SIGTERM)
    status, _ = server.end()
    assert status == 0
    entries = [json.loads(line) for line in server.err.read_text().splitlines()]
    assert {entry["process"] for entry in entries} >= {"launcher", "router", "shard 0"}


def test_a_running_answer_is_finished_at_sigterm(launch: Callable[..., Launched]) -> None:
    port = free_port()
    server = launch(port=port)
    server.wait_ready()
    connection, response = stream(port, 200)
    assert response.readline().startswith(b"data:")
    server.process.send_signal(signal.SIGTERM)
    text = response.read().decode()
    connection.close()
    assert '"generated_text"' in text.rsplit("data:", 1)[1]
    assert server.end()[0] == 0


def test_a_second_signal_ends_it_now(launch: Callable[..., Launched]) -> None:
    port = free_port()
    server = launch(port=port)
    server.wait_ready()
    connection, response = stream(port, 4000)
    assert response.readline().startswith(b"data:")
    server.process.send_signal(signal.SIGINT)
    wait_for(lambda: "INFO stopping" in server.err.read_text(), 10)  # the stream may take less than a second
    begun = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    status, _ = server.end()
    connection.close()
    assert status != 0
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(("module", "name"), [("headrace_shard", "shard 0"), ("headrace_router", "router")])
def test_a_dead_child_ends_everything(module: str, name: str, launch: Callable[..., Launched]) -> None:
    server = launch()
    server.wait_ready()
    os.kill(server.children()[module], signal.SIGKILL)
    status, last = server.end()
    assert status == 1
    assert last == f"error: {name} was killed by SIGKILL"


def test_a_killed_launcher_leaves_no_process(launch: Callable[..., Launched]) -> None:
    server = launch()
    server.wait_ready()
    assert len(orphans(server.process.pid)) == 2
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not orphans(server.process.pid), 5)
    (left,) = server.tmp.iterdir()
    assert [p.name for p in left.iterdir()] == ["lock"]
    again = launch()  # removes what is left, then is told to stop while it starts
    again.wait_child("headrace_shard")
    assert not left.exists()
    again.process.send_signal(signal.SIGTERM)
    assert again.end()[0] == 0


def test_a_shard_that_cannot_start_says_why_last(launch: Callable[..., Launched], tmp_path: Path) -> None:
    odd = write_tiny_model(tmp_path / "odd", model_type="no-such-family", architectures=["NoSuchModel"])
    status, last = launch(model_id=odd).end(START)
    assert status == 1
    assert last.startswith("error: shard 0 ended with status")
    assert "no-such-family" in last


def test_a_taken_port_is_found_at_once(launch: Callable[..., Launched]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begun = time.monotonic()
        server = launch(port=port)
        status, last = server.end()
        assert status == 1
        assert f"--port {port}" in last
        assert "in use" in last
        assert time.monotonic() - begun < 5
        assert len(server.err.read_text().splitlines()) == 1


def test_without_a_home_and_open_to_all(launch: Callable[..., Launched]) -> None:
    home = {"HOME": "/proc/nohome", "HF_HOME": "/proc/none", "HEADRACE_CACHE": "", "XDG_CACHE_HOME": ""}
    server = launch("--hostname", "0.0.0.0", env=home)
    assert "http://0.0.0.0:" in server.wait_ready()
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    text = server.err.read_text()
    assert "without --api-key" in text
    assert "Permission" not in text
