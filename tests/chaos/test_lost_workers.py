"""Workers are killed and frozen while streams run: every stream ends complete, with the text of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.chaos.conftest import SLOTS, WORKERS
from tests.chaos.streams import PATIENCE, Client, Heard, recoveries, until
from tests.networks import Network, Worker
from tests.processes import START

STREAMS = 20
TOKENS = 1000
KILLED = 2.0  # seconds from a kill to the next token at the user
FROZEN = 10.0


def same(calm: list[Heard], disturbed: list[Heard]) -> None:
    """Each stream is whole, and what it was in the calm run."""
    for one, other in zip(calm, disturbed, strict=True):
        one.check()
        other.check()
        assert other.ids == one.ids
        assert other.text == one.text


async def everybody_works(net: Network, heard: list[Heard]) -> None:
    """Wait until each stream has begun, and each worker has some."""
    await until(lambda: all(stream.is_under_way for stream in heard))
    await until(lambda: all(row["running"] for row in net.show()["workers"]))


def tell(what: str, seconds: list[float]) -> None:
    found = sorted(seconds)
    took = f"next token after {found[len(found) // 2]:.2f} s (median), {found[-1]:.2f} s (longest)" if found else ""
    print(f"\n{what}: {len(found)} streams went on elsewhere {took}")


async def test_a_killed_worker_loses_nothing(net: Network, client: Client) -> None:
    losses: list[float] = []

    async def lose_one(heard: list[Heard]) -> None:
        await everybody_works(net, heard)
        losses.append(net.kill(net.workers[-1]))

    calm = await client.ask_all(STREAMS, TOKENS)
    disturbed = await client.ask_all(STREAMS, TOKENS, lose_one)
    same(calm, disturbed)
    (times,) = recoveries(disturbed, losses)
    tell("killed", times)


async def kill_each_second(net: Network, tokens: int) -> list[list[float]]:
    """Seconds to the next token of those whom each kill met. The third one leaves nobody: then new workers come."""
    await asyncio.to_thread(net.add, WORKERS - len(net.workers))
    losses: list[float] = []

    async def lose_all(heard: list[Heard]) -> None:
        await everybody_works(net, heard)
        while net.workers:
            losses.append(net.kill(net.workers[0]))
            await asyncio.sleep(1)
        await asyncio.to_thread(net.add, WORKERS)

    async with aiohttp.ClientSession(timeout=PATIENCE) as session:
        client = Client(net.url, session)
        calm = await client.ask_all(STREAMS, tokens)
        disturbed = await client.ask_all(STREAMS, tokens, lose_all)
    same(calm, disturbed)
    found = recoveries(disturbed, losses)
    for number, times in enumerate(found):
        tell(f"killed, {WORKERS - 1 - number} left", times)
    return found


@pytest.mark.chaos
async def test_three_workers_one_killed_each_second(net: Network) -> None:
    """Workers that are faster than their gateway: much of what they have said is on the way when they are lost."""
    await kill_each_second(net, 2000)


@pytest.fixture(scope="module", params=["memory://", "embedded"])
def real(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Network]:
    """The same network on the default model."""
    broker, slots = ("--broker", request.param), ("--slots", str(SLOTS))
    with Network(embedded_model, tmp_path_factory.mktemp("real"), broker, slots) as made:
        yield made.start(WORKERS)


@pytest.mark.chaos
async def test_a_killed_worker_is_followed_at_once(real: Network) -> None:
    first, second, _ = await kill_each_second(real, 150)
    assert first
    assert second
    assert max(first + second) < KILLED


@pytest.mark.chaos
@pytest.mark.parametrize("what", ["", "headrace_shard"], ids=["machine", "shard"])
async def test_a_frozen_worker_is_followed(real: Network, what: str) -> None:
    """A machine that stands still; and a worker whose connection is well while its shard says nothing."""
    victim = real.workers[-1]
    losses: list[float] = []

    async def freeze(heard: list[Heard]) -> None:
        await everybody_works(real, heard)
        losses.append(victim.send(signal.SIGSTOP, what))

    async with aiohttp.ClientSession(timeout=PATIENCE) as session:
        client = Client(real.url, session)
        calm = await client.ask_all(STREAMS, 150)
        disturbed = await client.ask_all(STREAMS, 150, freeze)
    same(calm, disturbed)
    (times,) = recoveries(disturbed, losses)
    tell(f"frozen {what or 'machine'}", times)
    assert times
    assert max(times) < FROZEN
    if what:
        assert await asyncio.to_thread(victim.popen.wait, 20) == 1  # its launcher has seen it
        real.workers.remove(victim)
    else:
        victim.send(signal.SIGCONT)
        await until(lambda: len(real.show()["workers"]) == len(real.workers))


@pytest.mark.chaos
def test_a_stranger_is_refused(net: Network, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.token"
    wrong.write_text("wk_00000000_" + "0" * 64)
    worker = Worker(net.model, net.url, wrong)
    assert worker.popen.wait(START) == 1
    assert "refuses this worker: its token is not known" in worker.log()
    assert "0" * 64 not in worker.log()
