"""The store is killed, frozen and emptied, and a gateway is killed, while streams run: nothing is lost, nothing repeated."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from redis import Redis

from headrace_launcher import embedded
from tests.chaos.conftest import SLOTS
from tests.chaos.streams import PATIENCE, Client, Heard, question, until
from tests.chaos.test_lost_workers import STREAMS, TOKENS, everybody_works, same
from tests.fakes.brokers import Valkey
from tests.networks import Network

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def stored(long_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """A gateway whose requests are in an embedded Valkey server, and two workers."""
    folder = tmp_path_factory.mktemp("stored")
    with Network(long_model, folder, ("--broker", "embedded"), ("--slots", str(SLOTS))) as made:
        yield made.start(2)


def store(net: Network) -> psutil.Process:
    """The process of a gateway's own Valkey server."""
    return next(p for p in psutil.Process(net.gateway.popen.pid).children() if "valkey-server" in p.name())


async def killed(net: Network) -> None:
    store(net).kill()


async def paused(net: Network) -> None:
    process = store(net)
    process.suspend()
    await asyncio.sleep(3)
    process.resume()


async def frozen(net: Network) -> None:
    """For good: the launcher has to see it."""
    process = store(net)
    process.suspend()
    await asyncio.to_thread(process.wait, 30)


async def emptied(net: Network) -> None:
    with Redis(unix_socket_path=str(embedded.socket_of(embedded.folder_of(str(net.token_file))))) as client:
        client.flushall()


@pytest.mark.parametrize(("how", "lose"), [("killed", killed), ("paused", paused), ("frozen", frozen), ("emptied", emptied)])
async def test_a_lost_store_loses_nothing(stored: Network, how: str, lose: Callable[[Network], Awaitable[None]]) -> None:
    begun = 0.0

    async def disturb(heard: list[Heard]) -> None:
        nonlocal begun
        await everybody_works(stored, heard)
        begun = time.monotonic()
        await lose(stored)

    async with aiohttp.ClientSession(timeout=PATIENCE) as session:
        client = Client(stored.url, session)
        calm = await client.ask_all(STREAMS, TOKENS)
        disturbed = await client.ask_all(STREAMS, TOKENS, disturb)
        same(calm, disturbed)
    pauses = [max(heard.gaps) for heard in disturbed if heard.times[-1] > begun]
    print(f"\nstore {how}: {len(pauses)} streams went on, the longest pause {max(pauses):.2f} s")
    await until(lambda: stored.show()["queue"] == 0 == stored.show()["running"])


@pytest.fixture
async def pair(long_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Network, Network]]:
    """Two gateways on one Valkey server, with two workers each."""
    valkey = Valkey()
    shared, slots = ("--broker", valkey.url), ("--slots", str(SLOTS))
    made = [Network(long_model, tmp_path_factory.mktemp("pair"), shared, slots) for _ in range(2)]
    try:
        for net in made:
            await asyncio.to_thread(net.start, 2)
        yield made[0], made[1]
    finally:
        for net in made:
            net.stop()
        valkey.stop()


async def test_a_killed_gateway_loses_nothing(pair: tuple[Network, Network]) -> None:
    """Its readers go to the other one with the id of the last event that they have; so do its jobs."""
    here, there = pair
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=PATIENCE, connector=connector) as session:
        one, other = Client(here.url, session), Client(there.url, session)
        calm = await other.ask_all(STREAMS, TOKENS)
        jobs = [
            await (one, other)[n % 2].ask(question(n), TOKENS, seed=n, do_sample=bool(n % 2)) for n in range(STREAMS)
        ]
        heard = [Heard() for _ in jobs]

        async def read(job: str, heard: Heard) -> None:
            """At the first gateway while it lives, then at the other."""
            with contextlib.suppress(aiohttp.ClientError):
                async for event in one.events(job):
                    heard.hear(event)
            if not heard.events or heard.events[-1]["kind"] != "done":
                after = heard.logged[-1]["event_id"] if heard.logged else None
                async for event in other.events(job, after):
                    heard.hear(event)

        running = [asyncio.create_task(read(job, place)) for job, place in zip(jobs, heard, strict=True)]
        await until(lambda: all(stream.is_under_way for stream in heard))
        begun = here.kill_gateway()
        await asyncio.gather(*running)
    same(calm, heard)
    pauses = [max(stream.gaps) for stream in heard if stream.times[-1] > begun]
    print(f"\ngateway killed: {len(pauses)} streams went on at the other one, the longest pause {max(pauses):.2f} s")
