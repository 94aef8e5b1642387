"""Dockerfile and docker-compose.yml, as far as they can be checked without docker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_launcher import embedded
from tests import dockerfile
from tests.models import write_tiny_model
from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
SERVICE_KEYS = {
    "build", "image", "init", "ports", "volumes", "stop_grace_period", "healthcheck", "profiles", "entrypoint", "command",
    "depends_on", "deploy",
}
START = 90.0  # seconds

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_the_compose_file_is_sound() -> None:
    assert set(COMPOSE) == {"services", "volumes"}
    for name, service in SERVICES.items():
        assert set(service) <= SERVICE_KEYS, name
        assert "image" in service or "build" in service
        assert {"test", "interval", "timeout", "retries"} <= set(service["healthcheck"])
        assert service["healthcheck"]["test"][0] == "CMD"
        for volume in service["volumes"]:
            assert volume.split(":")[0] in COMPOSE["volumes"]
        for port in service.get("ports", []):
            assert re.fullmatch(r"\$\{\w+:-\d+\}:3000", port)
        for other, needed in service.get("depends_on", {}).items():
            assert other in SERVICES
            assert needed == {"condition": "service_healthy"}


def test_the_default_is_one_service_and_profiles_share_volumes() -> None:
    assert [name for name, service in SERVICES.items() if "profiles" not in service] == ["headrace"]
    split = {name: service for name, service in SERVICES.items() if service.get("profiles") == ["split"]}
    assert set(split) == {"shard", "router"}
    assert split["shard"]["volumes"] == split["router"]["volumes"] == ["run:/run/headrace", "cache:/cache"]
    network = {name: service for name, service in SERVICES.items() if service.get("profiles") == ["network"]}
    assert set(network) == {"valkey", "gateway", "worker"}
    assert network["gateway"]["volumes"] == network["worker"]["volumes"] == ["network:/run/headrace", "cache:/cache"]
    assert network["worker"]["deploy"] == {"replicas": 2}
    for name in ("headrace", "router", "gateway", "worker"):
        assert "/ready" in " ".join(SERVICES[name]["healthcheck"]["test"])


def test_the_dockerfile_is_sound() -> None:
    steps = dockerfile.read()
    names = [step.name for step in steps]
    assert names[0] == "FROM"
    assert names.count("ENTRYPOINT") == names.count("HEALTHCHECK") == names.count("USER") == 1
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for step in steps:
        if step.name == "COPY":
            for source in step.words[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, source
        if step.name in ("ENTRYPOINT", "CMD"):
            assert step.value.startswith("["), "the shell form hides signals"
    (entry,) = (step.words for step in steps if step.name == "ENTRYPOINT")
    assert "0.0.0.0" in entry
    assert {step.value.split("=")[0] for step in steps if step.name == "ARG"} == {"TORCH", "PIP_ARGS"}


class Container:
    """A service's command as a process: the image's paths become paths of this machine, `hosts` other services' addresses."""

    def __init__(
        self, name: str, run_folder: Path, port: int, *more: str, env: dict[str, str] | None = None,
        hosts: dict[str, str] | None = None,
    ) -> None:
        self.service, self.run_folder, self.port, self.hosts = SERVICES[name], run_folder, port, hosts or {}
        entry = next(step.words for step in dockerfile.read() if step.name == "ENTRYPOINT")
        command = [*self.service.get("entrypoint", entry), *self.service.get("command", [])]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, **(env or {})}
        argv = [*(self.here(word) for word in command), *more]
        self.process = subprocess.Popen(argv, env=self.env, stdin=subprocess.DEVNULL)

    def here(self, text: str) -> str:
        for name, address in self.hosts.items():
            text = text.replace(name, address)
        text = text.replace("/run/headrace", str(self.run_folder)).replace("$$", "$").replace("0.0.0.0", "127.0.0.1")
        return re.sub(r"\b3000\b", str(self.port), text)

    def wait_healthy(self) -> None:
        command = [self.here(word) for word in self.service["healthcheck"]["test"][1:]]
        end = time.monotonic() + START
        while subprocess.run(command, env=self.env, capture_output=True, check=False).returncode:
            assert self.process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.5)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture
def start(tmp_path: Path, unused_tcp_port: int) -> Iterator[Callable[..., Container]]:
    made: list[Container] = []

    def launch(name: str, *more: str, port: int = unused_tcp_port, **options: Any) -> Container:
        made.append(Container(name, tmp_path, port, *more, **options))
        return made[-1]

    yield launch
    for container in reversed(made):
        if container.process.poll() is None:
            container.stop()


def answer(port: int) -> str:
    body = json.dumps({"inputs": "The sky is", "parameters": {"max_new_tokens": 3}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.loads(response.read())["generated_text"])


def test_shard_and_router_as_services(start: Callable[..., Container], unused_tcp_port: int) -> None:
    shard = start("shard")
    shard.wait_healthy()
    router = start("router")
    router.wait_healthy()
    assert answer(unused_tcp_port)
    assert router.stop() == 0
    assert shard.stop() == 0


def test_the_default_service(start: Callable[..., Container], unused_tcp_port: int, tmp_path: Path) -> None:
    """On a tiny model, to be quick; that the default model is served is what the other test shows."""
    tiny = write_tiny_model(tmp_path / "tiny")
    server = start("headrace", env={"MODEL_ID": str(tiny)})
    server.wait_healthy()
    answer(unused_tcp_port)
    assert server.stop() == 0


def test_the_network(start: Callable[..., Container], unused_tcp_port: int, tmp_path: Path) -> None:
    """Gateway, store and one of the workers, on a tiny model."""
    tiny, socket = write_tiny_model(tmp_path / "tiny"), f"{tmp_path}/store"
    words = SERVICES["valkey"]["command"]
    assert words[0] == "valkey-server"
    own = ["--port", "0", "--unixsocket", socket, "--dir", str(tmp_path)]
    store = subprocess.Popen([str(embedded.binary()), *words[1:], *own], stdout=subprocess.DEVNULL)
    try:
        hosts = {"redis://valkey:6379": f"unix://{socket}", "gateway:3000": f"127.0.0.1:{unused_tcp_port}"}
        gateway = start("gateway", env={"MODEL_ID": str(tiny)}, hosts=hosts)
        gateway.wait_healthy()
        worker = start("worker", port=free_port(), env={"MODEL_ID": str(tiny)}, hosts=hosts)
        worker.wait_healthy()
        assert answer(unused_tcp_port)
        assert worker.stop() == 0
        assert gateway.stop() == 0
    finally:
        store.terminate()
        store.wait(10)
