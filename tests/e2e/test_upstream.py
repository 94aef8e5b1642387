"""`headrace worker --upstream` with real processes: a Headrace lent through each of its APIs gives its own answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import MAIN, START, Command, Service

DEFAULT = {"MODEL_ID": ""}  # the embedded model
NAME = "SmolLM2-135M-Instruct"
PROMPTS = ("The sky is", "Grüße, 世界! 🙂", "def f(x):\n    return")


class Gateway(Service):
    """A gateway for the default model, and the file with its first token."""

    def __init__(self, token_file: Path) -> None:
        self.token_file = token_file
        super().__init__("--role", "gateway", "--worker-token-file", str(token_file), "--allow-open-workers", env=DEFAULT)

    @property
    def workers(self) -> list[dict[str, Any]]:
        """Who is connected."""
        with urllib.request.urlopen(f"{self.url}/v1/workers", timeout=10) as reply:
            return list(json.load(reply)["workers"])

    def wait(self, worker: Command, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until the workers are as they should be."""
        end = time.monotonic() + START
        while not condition(self.workers):
            worker.check_alive()
            assert time.monotonic() < end, worker.log()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    made = Gateway(tmp_path_factory.mktemp("upstream") / "worker.token")
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


@contextlib.contextmanager
def lent(gateway: Gateway, upstream: Service, run_folder: Path, *flags: str) -> Iterator[Command]:
    """A worker with a run folder of its own, stopped by Ctrl-C."""
    before = len(gateway.workers)
    made = Command(
        "worker", "--gateway", gateway.url.replace("http", "ws"), "--worker-token-file", str(gateway.token_file),
        "--upstream", upstream.url, "--model-id", NAME, *flags, env={"XDG_RUNTIME_DIR": str(run_folder)},
    )
    try:
        gateway.wait(made, lambda workers: len(workers) > before)
        yield made
        made.popen.send_signal(signal.SIGINT)
        assert made.popen.wait(20) == 0, made.log()
        assert len(gateway.workers) == before
    finally:
        made.stop()


def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def control(run_folder: Path, *argv: str) -> tuple[int, str]:
    """`headrace worker ...`: its exit status and what it says."""
    env = {**os.environ, "XDG_RUNTIME_DIR": str(run_folder)}
    done = subprocess.run([sys.executable, *MAIN, "worker", *argv], capture_output=True, text=True, env=env, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("api", ["tgi", "openai"])
def test_a_lent_headrace_gives_its_own_answers(
    gateway: Gateway, service: Callable[..., Service], embedded_model: Path, tmp_path: Path, api: str
) -> None:
    upstream = service("--model-id", str(embedded_model))
    with lent(gateway, upstream, tmp_path, "--upstream-api", api):
        for prompt in PROMPTS:
            body = {"inputs": prompt, "parameters": {"max_new_tokens": 24, "details": True}}
            ours, theirs = post(f"{gateway.url}/generate", body), post(f"{upstream.url}/generate", body)
            assert ours["generated_text"] == theirs["generated_text"]
            assert [t["id"] for t in ours["details"]["tokens"]] == [t["id"] for t in theirs["details"]["tokens"]]
            assert ours["details"]["finish_reason"] == theirs["details"]["finish_reason"]
            logprobs = [t["logprob"] for t in theirs["details"]["tokens"]]
            assert [t["logprob"] for t in ours["details"]["tokens"]] == pytest.approx(logprobs, abs=1e-3)
        chat = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 60, "temperature": 0}
        told = [post(f"{url}/v1/chat/completions", chat) for url in (gateway.url, upstream.url)]
        for name in ("message", "finish_reason"):
            assert told[0]["choices"][0][name] == told[1]["choices"][0][name]
        assert told[0]["usage"]["completion_tokens"] == told[1]["usage"]["completion_tokens"]
        job = post(f"{gateway.url}/v1/requests", {"inputs": "One", "parameters": {"max_new_tokens": 4}})["id"]
        while state_of(gateway, job) != "done":
            time.sleep(0.05)
        assert job in upstream.log()
    assert not list(tmp_path.iterdir())


def test_owners_have_their_workers_in_hand(
    gateway: Gateway, service: Callable[..., Service], embedded_model: Path, tmp_path: Path
) -> None:
    upstream = service("--model-id", str(embedded_model))
    assert control(tmp_path, "status") == (1, "error: no worker runs on this machine, of this user\n")
    with lent(gateway, upstream, tmp_path, "--slots", "3") as one, lent(gateway, upstream, tmp_path) as other:
        names = [str(worker.popen.pid) for worker in (one, other)]
        status, text = control(tmp_path, "status")
        assert status == 0
        assert {line.split()[0] for line in text.splitlines()} == set(names)
        status, text = control(tmp_path, "pause")
        assert (status, all(name in text for name in names)) == (1, True)
        status, text = control(tmp_path, "pause", names[0])
        assert (status, "0 of 3 slots in use" in text, "takes nothing new: paused" in text) == (0, True, True)
        gateway.wait(one, lambda workers: "paused" in [row["state"] for row in workers])
        assert "paused" not in control(tmp_path, "status", names[1])[1]
        assert "paused" not in control(tmp_path, "resume", names[0])[1]
        gateway.wait(one, lambda workers: [row["state"] for row in workers] == ["idle", "idle"])


def test_a_stranger_joins_by_one_command_and_leaves_at_once(gateway: Gateway, tmp_path: Path) -> None:
    """It finds the model that is wanted, registers, answers probes, works for who allows it; Ctrl-C ends it amid a stream."""
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data"), **DEFAULT}
    worker = Command("worker", "--gateway", gateway.url.replace("http", "ws"), env=env)
    try:
        gateway.wait(worker, lambda workers: [row["tier"] for row in workers] == ["open"])
        (token,) = (tmp_path / "data/headrace/workers").iterdir()
        assert token.stat().st_mode & 0o777 == 0o600
        assert token.read_text().strip() not in worker.log()
        headers = {"X-Headrace-Min-Tier": "open"}
        name = post(f"{gateway.url}/v1/requests", {"inputs": "One", "parameters": {"max_new_tokens": 2000}}, headers)["id"]
        gateway.wait(worker, lambda workers: workers != [] and workers[0]["running"] == 1)
        worker.popen.send_signal(signal.SIGINT)
        assert worker.popen.wait(20) == 0, worker.log()
        assert state_of(gateway, name) == "queued"
    finally:
        worker.stop()
    urllib.request.urlopen(urllib.request.Request(f"{gateway.url}/v1/requests/{name}", method="DELETE"), timeout=10).close()


def state_of(gateway: Gateway, job: str) -> str:
    with urllib.request.urlopen(f"{gateway.url}/v1/requests/{job}", timeout=10) as reply:
        return str(json.load(reply)["state"])
