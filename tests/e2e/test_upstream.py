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

PROMPTS = ("The sky is", "Grüße, 世界! 🙂", "def f(x):\n    return")


class Gateway(Service):
    """A gateway and the file with its first token."""

    def __init__(self, model: Path, token_file: Path) -> None:
        self.token_file = token_file
        super().__init__("--model-id", str(model), "--role", "gateway", "--worker-token-file", str(token_file))


@pytest.fixture(scope="module")
def gateway(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    made = Gateway(embedded_model, tmp_path_factory.mktemp("upstream") / "worker.token")
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


@contextlib.contextmanager
def lent(gateway: Gateway, upstream: Service, run_folder: Path, *flags: str) -> Iterator[Command]:
    """A worker with a run folder of its own, stopped by Ctrl-C."""
    made = Command(
        "worker", "--gateway", gateway.url.replace("http", "ws"), "--worker-token-file", str(gateway.token_file),
        "--upstream", upstream.url, *flags, env={"XDG_RUNTIME_DIR": str(run_folder)},
    )
    end = time.monotonic() + START
    while gateway.metric("wn_workers") < 1:
        made.check_alive()
        assert time.monotonic() < end, made.log()
        time.sleep(0.05)
    yield made
    made.popen.send_signal(signal.SIGINT)
    assert made.popen.wait(10) == 0, made.log()
    assert not list(run_folder.iterdir())
    while gateway.metric("wn_workers") > 0:
        time.sleep(0.05)


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def control(do: str, run_folder: Path) -> str:
    env = {**os.environ, "XDG_RUNTIME_DIR": str(run_folder)}
    done = subprocess.run([sys.executable, *MAIN, "worker", do], capture_output=True, text=True, env=env, check=True)
    return done.stdout


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
        assert "takes nothing new: paused" in control("pause", tmp_path)
        assert "takes nothing new" not in control("resume", tmp_path)
        assert "1 of" not in control("status", tmp_path)


def state_of(gateway: Gateway, job: str) -> str:
    with urllib.request.urlopen(f"{gateway.url}/v1/requests/{job}", timeout=10) as reply:
        return str(json.load(reply)["state"])
