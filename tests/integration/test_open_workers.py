"""Who may work on which terms: strangers that register and are probed, tiers that requests ask for, tokens that end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace._common.errors import StartupError
from headrace_router.network import joining
from headrace_router.network.probation import PROBES
from headrace_router.network.registrar import OF_ADDRESS
from tests.fakes.network import Net, ScriptedWorker, network
from tests.fakes.routers import until
from tests.fakes.upstreams import Upstream, choice, lent

OPEN = {"X-Headrace-Min-Tier": "open"}
BODY = {"inputs": "hello", "parameters": {"max_new_tokens": 4}}


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Net]:
    async with network(tmp_path, allow_open_workers=True, no_worker_wait=0.1, api_key="secret", disconnect_grace=0.0) as made:
        yield made


async def stranger(net: Net, slots: int = 3) -> ScriptedWorker:
    """A worker that has just registered."""
    reply = await net.post("/v1/worker/register", {})
    assert (reply.status, reply.json["tier"]) == (201, "open")
    worker = await net.scripted(slots=slots, token=reply.json["token"])
    welcome = await worker.next("welcome")
    assert (welcome["tier"], welcome["slots"], welcome["models"]) == ("probation", 1, ["scripted"])
    return worker


async def answer(worker: ScriptedWorker, count: int) -> None:
    """Run some jobs as a worker would."""
    for _ in range(count):
        job = await worker.next("job")
        for _ in range(4):
            await worker.step(job, [40])
            await asyncio.sleep(0.002)
        await worker.done(job)


async def ask(net: Net, **headers: str) -> Any:
    return await net.post("/v1/requests", BODY, Authorization="Bearer secret", **headers)


async def test_a_stranger_gets_probes_and_then_what_callers_allow_it(net: Net) -> None:
    worker = await stranger(net)
    await asyncio.sleep(0.2)
    assert (await ask(net, **OPEN)).status == 503  # a worker on probation is none
    first = await worker.next("job")
    for _ in range(4):
        await worker.step(first, [40])
        await asyncio.sleep(0.002)
    await worker.done(first)
    await answer(worker, PROBES - 1)
    welcome = await worker.next("welcome")
    assert (welcome["tier"], welcome["slots"]) == ("open", 3)
    state = (await net.get("/v1/workers")).json["workers"]
    assert [(row["tier"], row["slots"]) for row in state] == [("open", 3)]
    refused = await ask(net)
    assert (refused.status, "of tier trusted" in refused.json["error"]["message"]) == (503, True)
    allowed = await ask(net, **OPEN)
    more = [(await ask(net, **OPEN)).json["id"] for _ in range(2)]
    given = [(await worker.next("job"))["job"] for _ in range(3)]
    assert given == [allowed.json["id"], *more]
    own = await net.scripted()
    assert (await own.next("welcome"))["tier"] == "owner"
    waits = await ask(net, **{"X-Headrace-Min-Tier": "owner"})
    assert (await own.next("job"))["job"] == waits.json["id"]


async def test_a_stranger_that_leaves_takes_its_probe_along(net: Net) -> None:
    worker = await stranger(net)
    await worker.next("job")
    worker.cut()
    await until(lambda: not net.gateway.sessions and net.gateway.waiting + net.gateway.running == 0)


@pytest.mark.parametrize("how", ["outside the vocabulary", "a gap", "nothing", "a failure", "too much"])
async def test_a_stranger_that_answers_wrong_is_sent_away(net: Net, how: str) -> None:
    worker = await stranger(net)
    job = await worker.next("job")
    most = job["params"]["max_new_tokens"]
    match how:
        case "outside the vocabulary":
            await worker.step(job, [100_000])
        case "a gap":
            await worker.step(job, [40], index=3)
        case "nothing":
            await worker.done(job)
        case "a failure":
            await worker.send(t="fail", job=job["job"], attempt=1, code="oom", retriable=False, message="no room")
        case "too much":
            await worker.step(job, [40] * (most + 1))
    if how in ("outside the vocabulary", "a gap", "too much"):  # the probe comes again, which is one attempt too many
        await answer(worker, 1)
    assert await worker.closed() == 4403


async def test_registration_has_limits_and_needs_the_operators_leave(net: Net, tmp_path: Path) -> None:
    replies = [await net.post("/v1/worker/register", {}) for _ in range(OF_ADDRESS + 1)]
    assert [reply.status for reply in replies] == [201] * OF_ADDRESS + [429]
    assert int(replies[-1].headers["Retry-After"]) > 3000
    assert replies[0].json["token"] not in net.router.service.network.tokens.path.read_text()  # type: ignore[union-attr]
    async with network(tmp_path / "closed") as closed:
        assert (await closed.post("/v1/worker/register", {})).status == 403
        with pytest.raises(StartupError, match="takes no strangers"):
            await asyncio.to_thread(joining.own_token_file, closed.url.replace("http", "ws"), False)


async def test_one_command_joins(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is kept for this user, and used again."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    gateway = net.url.replace("http", "ws")

    def join() -> tuple[str, str, int]:
        path = Path(joining.own_token_file(gateway, False))
        return str(path), path.read_text(), path.stat().st_mode & 0o777

    _, token, mode = first = await asyncio.to_thread(join)
    assert mode == 0o600
    assert await asyncio.to_thread(join) == first
    assert await asyncio.to_thread(joining.demanded_model, gateway, False) == "scripted"
    server = Upstream("vllm")
    await server.start()
    server.chunks = [choice(" one"), choice(" two"), choice("", "stop")]
    net.token_file.write_text(token)
    try:
        async with lent(net, server):
            await until(lambda: next(iter(net.gateway.sessions.values())).tier == "open")
            assert len(server.bodies) == PROBES
            reply = await net.post("/generate", BODY, Authorization="Bearer secret", **OPEN)
            assert reply.json["generated_text"] == " one two"
    finally:
        await server.stop()


async def test_terms_of_tokens_hold_and_end(net: Net) -> None:
    tokens = net.router.service.network.tokens  # type: ignore[union-attr]
    other = await net.scripted(token=tokens.create("otto", models=("org/other",)))
    assert await other.closed() == 4403
    assert "the token is for org/other" in other.frames[-1]["message"]
    few = await net.scripted(slots=8, token=tokens.create("anna", slots=2, models=("org/scripted",)))
    assert ((await few.next("welcome"))["slots"], few.frames[-1]["tier"]) == (2, "trusted")
    short = await net.scripted(token=tokens.create("eve", expires=int(time.time()) + 2))
    await short.next("welcome")
    assert await short.closed() == 4401
    assert not few.socket.closed
