"""Fixtures for all tests: model folders, and servers that are started once for each set of flags."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.models import write_tiny_model
from tests.processes import Service, ShardGroup, ShardProcess

TESTS = Path(__file__).parent
ON_THE_CLOCK = ("chaos", "e2e", "failures", "integration", "judges")

hypothesis.settings.register_profile("headrace", deadline=None)  # no test asserts speed
hypothesis.settings.load_profile("headrace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real processes have bounds in seconds, and other work on the machine may take these away: such a test that
    fails is tried once more, and named in the summary if it passes then.
    """
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in ON_THE_CLOCK:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The model folder of the default model, fetched if it is not in the cache."""
    command = [sys.executable, "-c", "from headrace_launcher.cli import main; main()", "resolve"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference() -> list[dict[str, Any]]:
    """What transformers answers; see tests/reference."""
    rows: list[dict[str, Any]] = json.loads((Path(__file__).parent / "reference/reference.json").read_text("utf-8"))
    return rows


@pytest.fixture(scope="session")
def shard() -> Iterator[Callable[..., ShardProcess]]:
    """shard(folder, *flags): a running shard, shared by all tests that ask for the same."""
    running: dict[tuple[str, ...], ShardProcess] = {}

    def get(folder: Path, *flags: str) -> ShardProcess:
        key = (str(folder), *flags)
        if key not in running:
            running[key] = ShardProcess(folder, *flags)
        return running[key].wait_ready()

    yield get
    for process in running.values():
        process.stop()


@pytest.fixture(scope="session")
def shard_group() -> Iterator[Callable[..., ShardGroup]]:
    """shard_group(folder, ranks, *flags): a running shard group, shared by all tests that ask for the same."""
    running: dict[tuple[str | int, ...], ShardGroup] = {}

    def get(folder: Path, world_size: int, *flags: str) -> ShardGroup:
        key: tuple[str | int, ...] = (str(folder), world_size, *flags)
        if key not in running:
            running[key] = ShardGroup(folder, world_size, *flags)
        return running[key].wait_ready()

    yield get
    for group in running.values():
        group.stop()


@pytest.fixture(scope="session")
def service() -> Iterator[Callable[..., Service]]:
    """service(*flags): a running service, shared by all tests that ask for the same."""
    running: dict[tuple[str, ...], Service] = {}

    def get(*flags: str) -> Service:
        if flags not in running:
            running[flags] = Service(*flags)
        return running[flags].wait_ready()

    yield get
    for process in running.values():
        process.stop()
