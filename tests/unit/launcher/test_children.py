"""Relaying a child's lines, and saying how it ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import psutil
import pytest

from headrace_launcher.children import Child

READY = "INFO ready: import 1.2 s, load 0.8 s, warm-up 0.3 s"


async def run(code: str, as_json: bool = False) -> Child:
    child = await Child.start("shard 0", [sys.executable, "-c", code], dict(os.environ), as_json)
    await child.ended
    return child


async def test_plain_lines_get_the_name(capfd: pytest.CaptureFixture[str]) -> None:
    code = f"import sys; print('one', flush=True); print({READY!r}, file=sys.stderr); print('no end', end='')"
    child = await run(code)
    assert sorted(capfd.readouterr().err.splitlines()) == sorted([
        "[shard 0] one", f"[shard 0] {READY}", "[shard 0] no end"
    ])
    assert child.startup_times == "import 1.2 s, load 0.8 s, warm-up 0.3 s"


async def test_json_lines_pass_and_others_are_wrapped(capfd: pytest.CaptureFixture[str]) -> None:
    line = json.dumps({"timestamp": "t", "level": "INFO", "process": "shard 0", "message": READY[5:]})
    child = await run(f"print({line!r}); print('plain'); print('{{'); print('ERROR bad \"thing\"')", as_json=True)
    entries = [json.loads(text) for text in capfd.readouterr().err.splitlines()]
    assert [entry["message"] for entry in entries] == [READY[5:], "plain", "{", 'bad "thing"']
    assert entries[3]["level"] == "ERROR"
    assert {entry["process"] for entry in entries} == {"shard 0"}
    assert child.startup_times is not None
    assert child.describe_end() == 'shard 0 ended with status 0: bad "thing"'


async def test_long_and_broken_lines(capfd: pytest.CaptureFixture[str]) -> None:
    await run("import sys; sys.stdout.buffer.write(b'x' * 3_000_000 + b'\\n\\xff\\xfe\\n')")
    err = capfd.readouterr().err
    assert err.count("x") == 3_000_000
    assert "\ufffd\ufffd" in err


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(3)", "shard 0 ended with status 3"),
        ("print('error: no such file'); print('INFO bye'); raise SystemExit(1)", "shard 0 ended with status 1: no such file"),
        ("1 / 0", "shard 0 ended with status 1: ZeroDivisionError: division by zero"),
        ("print('hello', flush=True); import os; os.kill(os.getpid(), 9)", "shard 0 was killed by SIGKILL"),
    ],
)
async def test_how_it_ended(code: str, expected: str) -> None:
    assert (await run(code)).describe_end() == expected


async def test_a_child_that_ignores_sigterm_is_killed_with_what_it_started() -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    child = await Child.start("shard 0", [sys.executable, "-c", code], dict(os.environ), False)
    async with asyncio.timeout(20):
        while child._last_line is None:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
    assert not await child.stop(0.2)
    assert child.process.returncode == -signal.SIGKILL
    grandchild = int(child._last_line)
    async with asyncio.timeout(5):
        while psutil.pid_exists(grandchild) and psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
