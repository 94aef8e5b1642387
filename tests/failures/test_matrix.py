"""Any process dies or freezes, idle or streaming: clients are told, health turns bad, everything ends, nothing is left.

The rows without a mark are the core, and run with `make test`; `make test-failures` runs all.
"""

from __future__ import annotations

import contextlib
import glob
import http.client
import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.models import write_tiny_model
from tests.processes import Service

FAULTS = Path(__file__).parent / "faults"
MARK = "HEADRACE_TEST_RUN"
BAD_WITHIN = 10.0  # seconds until health must be bad
GONE_WITHIN = 25.0  # and until everything must have ended
full = pytest.mark.failures


@dataclass(frozen=True)
class Row:
    """`who` suffers `how` while the service is `when`."""

    who: str
    how: str
    when: str

    def __str__(self) -> str:
        return f"{self.who}-{self.how}-{self.when}"


CORE = [
    Row("follower", "KILL", "streaming"), Row("leader", "STOP", "streaming"), Row("router", "STOP", "idle"),
    Row("launcher", "KILL", "streaming"), Row("follower", "raise", "streaming"),
]
ALL = [
    *(Row(who, how, when) for who in ("leader", "follower", "router") for how in ("KILL", "STOP", "TERM")
      for when in ("idle", "streaming") if (who, how, when) != ("router", "TERM", "streaming")),
    # A router that is told to end first lets its streams finish: tests/integration/test_router_process.py.
    *(Row("launcher", "KILL", when) for when in ("idle", "streaming")),
    *(Row(who, how, "streaming") for who in ("leader", "follower") for how in ("raise", "hang", "exit")),
]
ROWS = [pytest.param(row, id=str(row), marks=() if row in CORE else full) for row in ALL]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)


@dataclass
class Stream:
    """One streamed completion that is read on a thread; no token that is sampled ends it."""

    port: int
    events: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""  # "closed" or "aborted"

    def start(self) -> Stream:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        wait_for(lambda: len(self.events) > 3, 30)
        return self

    def _read(self) -> None:
        body = json.dumps({"prompt": "Tell", "max_tokens": 8000, "temperature": 2.0, "ignore_eos": True, "stream": True})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data:") and not line.endswith(b"[DONE]\n"):
                    self.events.append(json.loads(line[5:]))
            self.ended = "closed"
        except (OSError, http.client.HTTPException):
            self.ended = "aborted"

    @property
    def error(self) -> str | None:
        last = self.events[-1]
        return str(last["error"]) if "error" in last else None

    @property
    def looks_finished(self) -> bool:
        return any(choice["finish_reason"] is not None for choice in self.events[-1].get("choices", []))


def wait_for(true: Any, seconds: float) -> float:
    """Seconds until it is true."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - begun


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3)
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def family(mark: str) -> list[psutil.Process]:
    """Every process of this run that is alive."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(psutil.Error):
            if process.info["status"] != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


class Run:
    """A service of two shards whose processes can be made to fail."""

    def __init__(self, model: Path, folder: Path, fault: str = "", *flags: str) -> None:
        self.mark, self.trigger = folder.name, folder / "trigger"
        env = {
            MARK: self.mark, "HEADRACE_TEST_FAULT": fault, "HEADRACE_TEST_TRIGGER": str(self.trigger),
            "PYTHONPATH": os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self.service = Service("--num-shard", "2", "--model-id", str(model), *flags, env=env)

    def pid(self, who: str) -> int:
        words = {"router": "headrace_router", "leader": "--rank 0 ", "follower": "--rank 1 ", "launcher": "headrace_launcher"}
        (found,) = [p.pid for p in family(self.mark) if words[who] in " ".join(p.cmdline()) + " "]
        return found

    def strike(self, who: str, how: str) -> None:
        if how.isupper():
            os.kill(self.pid(who), getattr(signal, f"SIG{how}"))
        else:
            self.trigger.touch()

    def last_line(self) -> str:
        return self.service.log().strip().splitlines()[-1]

    def check_gone(self, status: int | None = None) -> None:
        """Exit status is bad, and no process, socket or file is left."""
        exit_status = self.service.popen.wait(GONE_WITHIN)
        assert exit_status != 0
        assert status is None or exit_status == status
        wait_for(lambda: not family(self.mark), 10)
        assert glob.glob(f"{self.service.prefix}-*") == []

    def end(self) -> None:
        for process in family(self.mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.service.stop()


@pytest.mark.parametrize("row", ROWS)
def test_a_process_fails(row: Row, model: Path, tmp_path: Path) -> None:
    rank = {"leader": "0", "follower": "1"}.get(row.who)
    run = Run(model, tmp_path, f"{rank}:{row.how}" if row.how.islower() else "")
    try:
        run.service.wait_ready()
        stream = Stream(run.service.port).start() if row.when == "streaming" else None
        run.strike(row.who, row.how)
        # A hung step is only known as one when its deadline is over.
        bad = wait_for(lambda: not healthy(run.service.port), BAD_WITHIN + 12 * (row.how == "hang"))
        run.check_gone(-9 if row.who == "launcher" else 1)
        if stream is not None:
            stream.thread.join(10)
            assert stream.ended
            assert not stream.looks_finished
            if row.who in ("leader", "follower"):
                assert stream.error is not None, stream.events[-1]
                assert "shard" in stream.error
        if row.who != "launcher":
            name = {"leader": "shard 0", "follower": "shard 1", "router": "router"}[row.who]
            assert name in run.last_line(), run.service.log()
            assert {"raise": "a fault that a test asked for", "hang": "in one step", "STOP": "had not answered"}.get(
                row.how, ""
            ) in run.last_line()
        if row.how == "hang":
            assert "sitecustomize.py" in run.service.log()  # the stacks say where it hangs
        print(f"{row}: health bad after {bad:.1f} s; {run.last_line()}")
    finally:
        run.end()


def test_no_memory_while_a_rank_loads(model: Path, tmp_path: Path) -> None:
    run = Run(model, tmp_path, "1:load")
    try:
        run.check_gone(1)
        assert "shard 1 ended with status 1: rank 1 cannot load" in run.last_line()
        assert "KV cache: Cannot allocate memory" in run.last_line()
    finally:
        run.end()


@full
def test_a_frozen_launcher_changes_nothing(model: Path, tmp_path: Path) -> None:
    run = Run(model, tmp_path)
    try:
        run.service.wait_ready()
        run.strike("launcher", "STOP")
        stream = Stream(run.service.port).start()
        time.sleep(8)
        assert healthy(run.service.port)
        assert stream.error is None
        run.strike("launcher", "CONT")
        time.sleep(3)
        assert healthy(run.service.port)
    finally:
        run.end()


def test_a_shard_group_restarts_in_place_and_its_requests_resume(model: Path, tmp_path: Path) -> None:
    run = Run(model, tmp_path, "", "--max-restarts", "1")
    try:
        run.service.wait_ready()
        port = run.service.port
        asked = {"prompt": "Hello there", "max_tokens": 6000, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = json.dumps(asked)

        def ask() -> Any:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            choice = json.loads(connection.getresponse().read())["choices"][0]
            return choice["text"], choice["token_ids"]

        expected = ask()
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(ask()))
        thread.start()
        time.sleep(0.5)
        assert got == []
        run.strike("follower", "KILL")
        wait_for(lambda: not healthy(port), BAD_WITHIN)
        thread.join(90)
        assert got == [expected]
        wait_for(lambda: healthy(port), BAD_WITHIN)
        run.strike("leader", "KILL")  # no restart is left
        run.check_gone(1)
    finally:
        run.end()
