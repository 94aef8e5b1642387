"""Log lines on stderr."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from headrace._common import logs


@pytest.fixture(autouse=True)
def restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_are_one_object_each(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", "info", as_json=True)
    logging.getLogger("x").warning("line one\nline two \u2603 %s", "yes")
    logging.getLogger("x").info("second")
    lines = capsys.readouterr().err.splitlines()
    first, second = (json.loads(line) for line in lines)
    assert first["message"] == "line one\nline two \u2603 yes"
    assert (first["level"], first["process"]) == ("WARNING", "router")
    assert second["message"] == "second"
    at = datetime.fromisoformat(first["timestamp"])
    assert at.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - at) < timedelta(seconds=10)


def test_json_lines_carry_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("shard 0", as_json=True)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("x").exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: boom" in json.loads(line)["error"]


@pytest.mark.parametrize("level", logs.LEVELS)
def test_levels(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", level)
    for name in logs.LEVELS:
        logging.getLogger("x").log(getattr(logging, name.upper()), "said at %s", name)
    shown = [line.rsplit(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert shown == list(logs.LEVELS[logs.LEVELS.index(level) :])


def test_setting_up_twice_logs_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router")
    logs.setup("router")
    logging.getLogger("x").info("once")
    assert capsys.readouterr().err == "INFO once\n"


def test_libraries_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", "info")
    logging.getLogger("aiohttp.access").info("GET /")
    logging.getLogger("grpc").info("channel")
    assert capsys.readouterr().err == ""
    logs.setup("router", "error")
    logging.getLogger("grpc").warning("not at this level")
    assert capsys.readouterr().err == ""
