"""The router as a process of its own: what it imports and weighs, how it starts and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.fakes.scripted_shard import ScriptedShard
from tests.fakes.text_models import write_text_model

ROOT = Path(__file__).parents[2]
MODULES = """
import sys, pkgutil, importlib, headrace_router
for module in pkgutil.walk_packages(headrace_router.__path__, "headrace_router."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import headrace_router.__main__
print(sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "transformers", "numpy", "headrace_shard")))
"""


@pytest.fixture
async def shard(tmp_path: Path) -> AsyncIterator[ScriptedShard]:
    write_text_model(tmp_path)
    made = ScriptedShard(step_seconds=0.005)
    await made.start(f"unix:{tmp_path}/shard-0")
    yield made
    await made.stop()


@contextlib.asynccontextmanager
async def process(folder: Path, *flags: str, target: str | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    """A router process; killed at the end if it still runs."""
    command = [
        sys.executable, "-m", "headrace_router", "--model-folder", str(folder), "--shard-target",
        target or f"unix:{folder}/shard-0", "--port", "0", *flags,
    ]
    made = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
            await made.wait()


async def url_of(made: asyncio.subprocess.Process) -> str:
    """The URL in the line that says it listens."""
    assert made.stderr is not None
    async with asyncio.timeout(10):
        while line := (await made.stderr.readline()).decode():
            if found := re.search(r"listening on (http://\S+)", line):
                return found[1]
    raise AssertionError("the router ended without listening")


async def stderr_of(made: asyncio.subprocess.Process) -> list[str]:
    assert made.stderr is not None
    async with asyncio.timeout(10):
        text = (await made.stderr.read()).decode()
        await made.wait()
    return text.splitlines()


async def test_start_memory_and_first_answer(shard: ScriptedShard, tmp_path: Path) -> None:
    start = time.perf_counter()
    async with process(tmp_path) as made, aiohttp.ClientSession() as session:
        url = await url_of(made)
        assert time.perf_counter() - start < 4  # alone on a machine it is under 1 s; tests share theirs
        body = {"inputs": "x", "parameters": {"max_new_tokens": 3}}
        async with session.post(url + "/generate", json=body) as response:
            assert response.status == 200
        assert psutil.Process(made.pid).memory_info().rss < 200e6


async def test_no_torch_among_its_modules() -> None:
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MODULES, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    out, _ = await made.communicate()
    assert (made.returncode, out.decode().strip()) == (0, "[]")


@pytest.mark.parametrize(("flag", "value", "words"), [
    ("--api-keys-file", "keys.toml", "line 2: [tenants.a] rpm"), ("--cors-allow-origin", "example.org", "https://example.org"),
])
async def test_settings_that_are_not_usable_are_one_line(tmp_path: Path, flag: str, value: str, words: str) -> None:
    write_text_model(tmp_path)
    (tmp_path / "keys.toml").write_text("[tenants.a]\nrpm = 5\n", "utf-8")
    (tmp_path / "keys.toml").chmod(0o600)
    value = str(tmp_path / value) if value.endswith("toml") else value
    async with process(tmp_path, flag, value) as made:
        (line,) = await stderr_of(made)
        assert made.returncode == 1
    assert line.startswith(f"error: {flag} {value}: ")
    assert words in line


async def test_a_taken_port_is_one_line(shard: ScriptedShard, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with process(tmp_path, "--port", str(port)) as made:
            lines = await stderr_of(made)
            assert made.returncode == 1
    assert len(lines) == 1
    assert str(port) in lines[0]


async def test_bad_starts_are_one_line(shard: ScriptedShard, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = write_text_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    target = f"unix:{tmp_path}/shard-0"
    starts = [(empty, (), "config.json"), (broken, (), "tokenizer"), (tmp_path, ("--max-total-tokens", "9999"), "9999")]

    async def start(folder: Path, flags: tuple[str, ...], word: str) -> None:
        async with process(folder, *flags, target=target) as made:
            lines = await stderr_of(made)
            assert made.returncode == 1
        assert len(lines) == 1
        assert word in lines[0]

    await asyncio.gather(*(start(*row) for row in starts))


async def test_sigterm_lets_running_requests_end(shard: ScriptedShard, tmp_path: Path) -> None:
    async with process(tmp_path) as made, aiohttp.ClientSession() as session:
        url = await url_of(made)
        body = {"inputs": "x", "parameters": {"max_new_tokens": 100}}
        async with session.post(url + "/generate_stream", json=body) as response:
            await response.content.readline()
            made.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            async with session.post(url + "/generate", json=body) as late:
                assert late.status == 503
            assert b'"index":100' in await response.read()
        await stderr_of(made)
        assert made.returncode == 0


async def test_a_second_sigterm_ends_at_once(shard: ScriptedShard, tmp_path: Path) -> None:
    async with process(tmp_path) as made, aiohttp.ClientSession() as session:
        url = await url_of(made)
        body = {"inputs": "x", "parameters": {"max_new_tokens": 1000}}
        async with session.post(url + "/generate_stream", json=body) as response:
            await response.content.readline()
            for _ in range(2):
                made.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.2)
            assert b'"error_type":"generation"' in await response.read()
        await stderr_of(made)
        assert made.returncode == 0


async def test_a_killed_shard_gives_an_error_event(tmp_path: Path) -> None:
    write_text_model(tmp_path)
    target = f"unix:{tmp_path}/shard-0"
    shard = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.scripted_shard", "--target", target, "--step-ms", "5", cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert shard.stdout is not None
        await shard.stdout.readline()
        async with process(tmp_path) as made, aiohttp.ClientSession() as session:
            url = await url_of(made)
            body = {"inputs": "x", "parameters": {"max_new_tokens": 1000}}
            async with session.post(url + "/generate_stream", json=body) as response:
                await response.content.readline()
                shard.kill()
                assert (await response.read()).count(b'"error_type":"generation"') == 1
            async with asyncio.timeout(5):
                while (await session.get(url + "/health")).status != 503:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(shard.pid, signal.SIGKILL)
        await shard.wait()
