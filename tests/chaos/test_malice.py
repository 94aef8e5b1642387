"""Workers that flood, lie, keep silent and meddle: the gateway's memory and everybody else's streams are unharmed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace_router.network.frames import PATH
from headrace_router.network.role import WATCH_SECONDS
from headrace_router.network.tokens import WorkerTokens
from tests.chaos.streams import Client, Heard, until
from tests.fakes.network import JSON, ScriptedWorker
from tests.networks import Network

pytestmark = pytest.mark.chaos
MEGABYTES = 30.0  # that a gateway may grow by under one attack
STREAMS, TOKENS = 12, 300
FLOOD = 20_000  # frames
MANY = 200  # connections

Attack = Callable[["Attacker"], Awaitable[None]]


class Attacker(ScriptedWorker):
    """A worker with a valid token and bad intentions. `jobs`: what it was given; `prey`: requests whose text may be a lie."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, net: Network) -> None:
        super().__init__(socket)
        self.net = net
        self.jobs: list[dict[str, Any]] = []
        self.prey: list[str] = []

    async def take_jobs(self) -> None:
        """Until it has some and no more come."""
        with contextlib.suppress(TimeoutError):
            while True:
                self.jobs.append(await self.next("job", 1.0 if not self.jobs else 0.2))
        assert self.jobs

    async def try_sending(self, text: str) -> None:
        with contextlib.suppress(ConnectionError):
            await self.socket.send_str(text)

    async def rows(self, *rows: Any) -> None:
        await self.try_sending(json.dumps({"t": "step", "x": rows}))


async def flood(attacker: Attacker) -> None:
    """Frames of every kind, as fast as the line takes them, and none of the answers is read."""
    kinds: list[dict[str, Any]] = [
        {"t": "ping", "n": 1}, {"t": "something"}, {"t": "status", "running": [["x" * 32, 1, 1]] * 50},
        {"t": "done", "job": "y" * 32, "attempt": 1}, {"t": "accept", "job": "z", "attempt": 2},
        {"t": "step", "x": [["f" * 32, 1, k, 40, -1.0, 0, []] for k in range(50)]},
    ]
    texts = [json.dumps(kind) for kind in kinds]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):
            for number in range(FLOOD):
                await attacker.try_sending(texts[number % len(texts)])
    attacker.cut()


async def oversize(attacker: Attacker) -> None:
    await attacker.take_jobs()
    await attacker.try_sending(json.dumps({"t": "fail", "message": "x" * (2 << 20)}))
    assert await attacker.closed() == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


async def garbage(attacker: Attacker) -> None:
    await attacker.take_jobs()
    for text in ("[" * 100_000, '{"t": "step", "x": 5}', '{"t": "step", "x": [[1]]}'):
        await attacker.try_sending(text)
    assert await attacker.closed() == 4400


async def wrong_tokens(attacker: Attacker) -> None:
    """Each costs that job, the third one the connection."""
    await attacker.take_jobs()
    job = attacker.jobs[0]["job"]
    await attacker.rows([job, 1, 0, 40, -1.0, 0, []], [job, 1, 5, 40, -1.0, 0, []])
    for number, token in enumerate((10**6, -1, 2**40)):
        await attacker.rows([attacker.jobs[number % len(attacker.jobs)]["job"], 1, 0, token, -1.0, 0, []])
    for _ in range(3):
        await attacker.try_sending("no frame")
    assert await attacker.closed() == 4400


async def other_workers_jobs(attacker: Attacker) -> None:
    """News of everything that runs, whoever has it, and of every attempt but its own."""
    await attacker.take_jobs()
    own = {frame["job"] for frame in attacker.jobs}
    for job in [*attacker.prey, *own]:
        for attempt in (0, 2, 3) if job in own else (1, 2, 3):
            await attacker.rows([job, attempt, 0, 41, -1.0, 0, []], [job, attempt, 9, 42, -1.0, 0, []])
            for kind in ("done", "fail", "nack", "prompt"):
                frame = {"t": kind, "job": job, "attempt": attempt, "tokens": [], "retriable": False, "finish": "eos"}
                await attacker.try_sending(json.dumps(frame))
    await attacker.send(t="bye")
    await attacker.closed()


async def endless_lists(attacker: Attacker) -> None:
    """Log probabilities, as many as a frame holds, for requests that want two."""
    await attacker.take_jobs()
    top = [[7, -1.0]] * 50_000
    for job in attacker.prey:
        await attacker.try_sending(json.dumps({"t": "prompt", "job": job, "attempt": 1, "tokens": [[7, -1.0, top]]}))
        for index in range(50):
            await attacker.rows([job, 1, index, 40, -1.0, 0, top])
    attacker.cut()


async def labels(attacker: Attacker) -> None:
    """Reasons that would make metrics of their own."""
    await attacker.take_jobs()
    for number, frame in enumerate(attacker.jobs):
        code = f'x"}} 1\nwn_forged {number}'
        await attacker.try_sending(json.dumps({"t": "fail", "job": frame["job"], "attempt": 1, "code": code}))
    attacker.cut()
    text = await asyncio.to_thread(attacker.net.gateway.metrics)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert "wn_forged" not in families
    assert len(families["wn_redeliveries"].samples) < 12


async def silence(attacker: Attacker) -> None:
    """It takes all that it is given and says nothing, not even that it lives."""
    await attacker.take_jobs()
    await asyncio.sleep(1)


async def half_open(attacker: Attacker) -> None:
    """Connections that never say what they want, and workers that never say hello."""
    address = urlsplit(attacker.net.url)
    lines = []
    for _ in range(MANY):
        lines.append(socket.create_connection((address.hostname, address.port), 5))
        lines[-1].sendall(f"GET {PATH} HTTP/1.1\r\nHost: x\r\n".encode())
    await asyncio.sleep(1)
    assert attacker.net.show()["workers"]
    for line in lines:
        line.close()
    attacker.cut()


ATTACKS: list[Attack] = [
    flood, oversize, garbage, wrong_tokens, other_workers_jobs, endless_lists, labels, silence, half_open,
]


@contextlib.asynccontextmanager
async def joined(net: Network, token: str) -> AsyncIterator[Attacker]:
    """A worker that claims more slots than anybody could have."""
    model = {
        "id": net.model.name, "tokenizer_hash": hashlib.sha256((net.model / "tokenizer.json").read_bytes()).hexdigest(),
        "format": "float32", "max_total": 10**9,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(net.url + PATH, headers={"Authorization": f"Bearer {token}"}, protocols=[JSON]) as line,
    ):
        attacker = Attacker(line, net)
        await attacker.send(t="hello", agent="x" * 10_000, models=[model], slots=10**9)
        yield attacker


@pytest.fixture(scope="module")
def calm() -> list[Heard]:
    """Filled by the first test."""
    return []


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.__name__ for attack in ATTACKS])
async def test_an_attack_harms_nobody(net: Network, client: Client, calm: list[Heard], attack: Attack) -> None:
    if not calm:
        calm += await client.ask_all(STREAMS, TOKENS)
    router = next(p for p in psutil.Process(net.gateway.popen.pid).children() if "headrace_router" in p.cmdline())
    before, workers = router.memory_info().rss, {row["session"] for row in net.show()["workers"]}
    async with joined(net, net.token_file.read_text().strip()) as attacker:
        await attacker.next("welcome")
        attacker.prey = [await client.ask(f"Prey {number}", TOKENS, top_n_tokens=2) for number in range(4)]
        asked = asyncio.create_task(client.ask_all(STREAMS, TOKENS))
        await attack(attacker)
    heard = await asked
    for job in attacker.prey:
        (await client.follow(job)).check()
    for one, other in zip(calm, heard, strict=True):
        other.check()
        assert other.ids == one.ids
    grown = (router.memory_info().rss - before) / 1e6
    print(f"\n{attack.__name__}: the gateway has grown by {grown:.1f} MB")
    assert grown < MEGABYTES
    await until(lambda: net.show()["running"] == 0)
    await until(lambda: {row["session"] for row in net.show()["workers"]} == workers)


async def test_a_revoked_token_opens_nothing(net: Network) -> None:
    tokens = WorkerTokens(str(net.token_file))
    token = tokens.create("gone")
    await asyncio.sleep(2 * WATCH_SECONDS)
    async with joined(net, token) as attacker:
        await attacker.next("welcome")
        tokens.revoke(token.split("_")[1])
        assert await attacker.closed() == 4401
    with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
        async with joined(net, token):
            pass
