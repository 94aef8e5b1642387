"""The worker network with real processes: a gateway without shards and two workers, one of which is killed or frozen."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.processes import START, Process, Service

STREAMS = 20
TOKENS = 400


class Worker(Process):
    """`headrace worker` on a model."""

    def __init__(self, model: Path, gateway: Service, token_file: Path) -> None:
        prefix = Path(tempfile.mkdtemp(prefix="headrace-test-")) / "s"
        super().__init__(
            "headrace_launcher", "--model-id", str(model), "--gateway", gateway.url.replace("http", "ws"), "--port", "0",
            "--worker-token-file", str(token_file), "--shard-uds-path", str(prefix),
        )

    def send(self, number: signal.Signals) -> None:
        """A signal to every process of the worker, as when its machine is lost or stands still."""
        for process in [*psutil.Process(self.popen.pid).children(recursive=True), psutil.Process(self.popen.pid)]:
            os.kill(process.pid, number)


class Net:
    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.token_file = model, folder / "worker.token"
        self.gateway = Service(
            "--model-id", str(model), "--role", "gateway", "--worker-token-file", str(self.token_file)
        )
        self.workers: list[Worker] = []

    def start(self) -> Net:
        self.gateway.wait_ready()
        self.add(2)
        return self

    def add(self, count: int) -> None:
        before = self.gateway.metric("wn_workers")
        self.workers += [Worker(self.model, self.gateway, self.token_file) for _ in range(count)]
        end = time.monotonic() + START
        while self.gateway.metric("wn_workers") < before + count:
            for worker in self.workers[-count:]:
                worker.check_alive()
            assert time.monotonic() < end, self.workers[-1].log()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def net(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    made = Net(tiny_model, tmp_path_factory.mktemp("network"))
    try:
        yield made.start()
    finally:
        for worker in made.workers:
            if worker.popen.poll() is None:
                worker.send(signal.SIGCONT)
            worker.stop()
        assert made.gateway.stop() == 0


async def read(session: aiohttp.ClientSession, url: str, number: int) -> list[dict[str, Any]]:
    """The tokens of one stream, half of them greedy, half drawn from a seed."""
    parameters: dict[str, Any] = {"max_new_tokens": TOKENS, "seed": number, "do_sample": bool(number % 2)}
    body = {"inputs": f"question {number}", "parameters": parameters}
    async with session.post(f"{url}/generate_stream", json=body) as response:
        assert response.status == 200
        events = [json.loads(line[5:]) async for line in response.content if line.startswith(b"data:")]
    assert events[-1].get("generated_text") is not None, events[-1]
    return [event["token"] for event in events]


async def ask_all(net: Net, meanwhile: Any) -> list[list[dict[str, Any]]]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        running = [asyncio.create_task(read(session, net.gateway.url, number)) for number in range(STREAMS)]
        await meanwhile()
        return await asyncio.gather(*running)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_lost_worker_loses_nothing(net: Net, number: signal.Signals) -> None:
    async def nothing() -> None:
        pass

    async def lose_one() -> None:
        """Lose the last worker once each of them has said a part of its answers."""
        url = f"{net.gateway.url}/v1/workers"
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            said: dict[str, int] = {}
            while True:
                async with session.get(url) as response:
                    rows = (await response.json())["workers"]
                for row in rows:
                    said.setdefault(row["session"], row["tokens"])
                if all(row["running"] and row["tokens"] > said[row["session"]] + 20 * STREAMS for row in rows):
                    net.workers[-1].send(number)
                    return
                await asyncio.sleep(0.01)

    calm = await ask_all(net, nothing)
    before = net.gateway.metric("wn_resume_tokens_total")
    disturbed = await ask_all(net, lose_one)
    for one, other in zip(calm, disturbed, strict=True):
        assert [token["id"] for token in other] == [token["id"] for token in one]
        assert "".join(token["text"] for token in other) == "".join(token["text"] for token in one)
    assert net.gateway.metric("wn_resume_tokens_total") > before
    if number is signal.SIGKILL:
        net.add(1)


def test_a_stranger_is_refused(net: Net, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.token"
    wrong.write_text("wk_00000000_" + "0" * 64)
    worker = Worker(net.model, net.gateway, wrong)
    assert worker.popen.wait(START) == 1
    assert "refuses this worker: its token is not known" in worker.log()
    assert "0" * 64 not in worker.log()
