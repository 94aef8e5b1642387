"""Starting the processes in order, watching them, and stopping them in order.

    embedded broker -> shards and router -> Health of every rank -> /health is 200 -> one line on stdout -> watch
    SIGTERM: router drains and ends -> shards end -> status 0.  A dead or frozen child: everything ends -> status 1,
    unless it is a shard and --max-restarts allows to start the shard group again. The broker is always started again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from headrace._common.errors import StartupError
from headrace_launcher import arguments, embedded, probes, sockets
from headrace_launcher.arguments import Plan
from headrace_launcher.children import Child
from headrace_launcher.models.resolve import Resolved
from headrace_router.settings import RouterSettings

T = TypeVar("T")
log = logging.getLogger(__name__)

_PROGRESS = 5.0  # seconds between lines about a starting process
_SHARD_STOP = 5.0  # seconds that a shard gets to end after SIGTERM
_ROUTER_STOP = 5.0  # the same for the router when a shard is dead: nothing can be drained any more
_WATCH = 1.0  # seconds between questions to each child
_ANSWER = 5.0  # seconds without an answer after which a child counts as frozen
_ROUTER_START = 60.0  # the same for a router that starts, once the shards are ready
_STACKS = 0.5  # seconds for a frozen process to write where it is, before it is killed
_CAUSE = 2.0  # seconds for the rank at fault to end too, after one that only lost it
_LOST_GROUP = 3  # exit status of a rank that ends because another one did


class _Stopped(Exception):
    """A signal asked for the end."""


class _Died(Exception):
    def __init__(self, child: Child) -> None:
        self.child = child


@dataclasses.dataclass(frozen=True)
class Started:
    """What the ready line tells."""

    model: str
    router_url: str | None
    shard_target: str
    seconds: float
    breakdown: str


class Supervisor:
    """The life of one shard group and its router."""

    def __init__(
        self, plan: Plan, model: Resolved, prefix: str, announce: Callable[[Started], None], started: float
    ) -> None:
        """`prefix`: of the unix sockets; `started`: monotonic time at which the launcher began."""
        self._plan, self._model, self._prefix, self._announce, self._began = plan, model, prefix, announce, started
        self._env = arguments.child_environment(plan)
        self._paths: list[Path] = []
        self._shards: list[Child] = []
        self._probes: list[probes.ShardProbe] = []
        self._router: Child | None = None
        self._store: embedded.Keeper | None = None
        self._signals = 0
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    async def run(self) -> None:
        """Start everything and wait for the end.

        Raises:
            StartupError: a child died, or a second signal cut the stop short; its text is the last line to print.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            nohup = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
            if not nohup:
                loop.add_signal_handler(number, self._on_signal)
        self._paths = sockets.prepare_prefix(self._prefix, self._plan.shards)
        dead: Child | None = None
        try:
            await self._start()
            await self._stay_up()
        except _Stopped:
            log.info("stopping")
        except _Died as error:
            dead = await self._cause(error.child)
        finally:
            await self._end(dead)
            sockets.remove(self._prefix, self._paths)
        if dead is not None:
            raise StartupError(dead.describe_end())
        if self._kill.is_set():
            raise StartupError("stopped at once by a second signal")

    def _on_signal(self) -> None:
        self._signals += 1
        (self._stop if self._signals == 1 else self._kill).set()

    # starting

    async def _start(self) -> None:
        plan, ranks = self._plan, len(self._paths)
        log.info("starting %d shard%s for %s", ranks, "s" * (ranks != 1), self._model.name)
        await self._spawn_shards()
        target = f"unix:{self._paths[0]}" if self._paths else ""
        if plan.embedded_store is not None:
            embedded.prepare(plan.embedded_store)
            self._store = embedded.Keeper(plan.embedded_store, self._env, plan.launcher.json_output)
            await self._guarded(self._progress("the broker starts", self._store.start()))
        if plan.router is not None:  # it waits for the leading shard by itself, so its imports cost no time
            self._router = await self._spawn_router(plan.router, target)
        breakdown = "a gateway, whose workers run the model"
        if self._shards:
            await self._guarded(self._progress("the shards load the model", self._shards_answer()))
            breakdown = self._shards[0].startup_times or "shard ready"
        router_url = None
        if plan.router is not None:
            before = time.monotonic()
            await self._guarded(self._progress("the router starts", self._router_answers(plan.router)))
            router_url = sockets.url(plan.router.hostname, plan.router.port)
            breakdown += f", router {time.monotonic() - before:.1f} s"
        self._announce(Started(self._model.name, router_url, target, time.monotonic() - self._began, breakdown))

    async def _spawn_shards(self) -> None:
        self._shards = []
        self._probes = [probes.ShardProbe(path) for path in self._paths]
        for rank in range(len(self._paths)):
            settings = dataclasses.replace(
                self._plan.shard, model_folder=str(self._model.folder), model_id=self._model.name, rank=rank,
                shard_uds_path=self._prefix,
            )
            command, as_json = arguments.shard_command(settings), self._plan.launcher.json_output
            self._shards.append(await Child.start(f"shard {rank}", command, self._env, as_json))

    async def _shards_answer(self) -> None:
        for probe in self._probes:
            await probe.wait()

    async def _spawn_router(self, router: RouterSettings, target: str) -> Child:
        settings = dataclasses.replace(
            router, model_folder=str(self._model.folder), model_id=self._model.name, model_sha=self._model.sha,
            shard_target=target, shard_restarts=self._plan.launcher.max_restarts > 0,
        )
        if self._plan.embedded_store is not None:
            settings = dataclasses.replace(settings, broker=f"unix://{embedded.socket_of(self._plan.embedded_store)}")
        as_json = self._plan.launcher.json_output
        return await Child.start("router", arguments.router_command(settings), self._env, as_json)

    async def _router_answers(self, router: RouterSettings) -> None:
        """Wait for the router's first good answer while the shards are watched; without one it counts as frozen."""
        watching = asyncio.ensure_future(asyncio.gather(*self._shard_watches()))
        try:
            async with asyncio.timeout(_ROUTER_START):
                await probes.http_healthy(router.hostname, router.port)
        except TimeoutError:
            assert self._router is not None
            await self._kill_frozen(self._router, _ROUTER_START)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    # watching

    async def _stay_up(self) -> NoReturn:
        """Watch until a signal or a death; restart the shard group in place while that is allowed."""
        restarts = 0
        while True:
            try:
                await self._guarded(self._watch_all())
            except _Died as error:
                if error.child is self._router or restarts >= self._plan.launcher.max_restarts:
                    raise
                restarts += 1
                cause = await self._cause(error.child)
                log.warning("%s; restart %d of %d", cause.describe_end(), restarts, self._plan.launcher.max_restarts)
                await self._restart_shards()

    async def _restart_shards(self) -> None:
        for shard in self._shards:
            shard.kill()
        await asyncio.gather(*(shard.ended for shard in self._shards))
        sockets.remove(self._prefix, self._paths)
        await self._spawn_shards()
        await self._guarded(self._progress("the shards load the model again", self._shards_answer()))
        log.info("the shards serve again")

    async def _watch_all(self) -> None:
        """Ask every child again and again; returns only by being cancelled."""
        watches = self._shard_watches()
        router = self._plan.router
        if self._router is not None and router is not None:
            watches.append(self._watch(self._router, lambda: probes.http_health(router.hostname, router.port, _ANSWER)))
        if self._store is not None:
            watches.append(self._store.keep())
        await asyncio.gather(*watches)

    def _shard_watches(self) -> list[Coroutine[Any, Any, None]]:
        return [
            self._watch(shard, lambda probe=probe: probe.healthy(_ANSWER))  # type: ignore[misc]
            for shard, probe in zip(self._shards, self._probes, strict=True)
        ]

    async def _watch(self, child: Child, ask: Callable[[], Awaitable[bool | None]]) -> None:
        """A child that does not answer is frozen: it writes its stacks, if it still can, and is killed.

        A bad answer is an answer: a shard in trouble says so and ends by itself, a router reports its shards' troubles.
        """
        while child.alive:
            await asyncio.sleep(_WATCH)
            if await ask() is None and child.alive:
                await self._kill_frozen(child, _ANSWER)
                return

    async def _kill_frozen(self, child: Child, seconds: float) -> None:
        log.error("%s has not answered for %g s: it is frozen", child.name, seconds)
        child.send(signal.SIGUSR1)
        await asyncio.sleep(_STACKS)
        child.freeze_note = f"it had not answered for {seconds:g} s"
        child.kill()

    async def _guarded(self, work: Awaitable[T]) -> T:
        """The result of `work`, unless a signal or the death of a child comes first."""
        children = [*self._shards, *([self._router] if self._router else [])]
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop, *(child.ended for child in children)}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                raise _Stopped
            for child in children:
                if not child.alive:
                    raise _Died(child)
            return await task
        finally:
            for left in (task, stop):
                left.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _cause(self, dead: Child) -> Child:
        """The child whose end explains the others': not one that only lost another rank."""
        deadline = time.monotonic() + _CAUSE
        while True:
            ended = [c for c in (*self._shards, *([self._router] if self._router else [])) if not c.alive]
            for child in ended:
                if child.process.returncode != _LOST_GROUP:
                    return child
            if time.monotonic() > deadline:
                return dead
            await asyncio.sleep(probes.POLL_SECONDS)

    async def _progress(self, what: str, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        begun = time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=_PROGRESS))[0]:
                log.info("%s (%.0f s)", what, time.monotonic() - begun)
            await task
        finally:
            task.cancel()

    # stopping

    async def _end(self, dead: Child | None) -> None:
        """Router first, then the shards, then the broker; a second signal kills what is left."""
        stopping = asyncio.ensure_future(self._stop_in_order(dead))
        kill = asyncio.ensure_future(self._kill.wait())
        await asyncio.wait({stopping, kill}, return_when=asyncio.FIRST_COMPLETED)
        kill.cancel()
        children = [*self._shards, *([self._router] if self._router else [])]
        if not stopping.done():
            for child in children:
                child.kill()
            if self._store is not None:
                self._store.kill()
        await stopping
        for child in children:
            child.kill()  # the rest of its process group

    async def _stop_in_order(self, dead: Child | None) -> None:
        if self._router is not None and self._router.alive:
            grace = self._plan.launcher.graceful_termination_timeout if dead is None else _ROUTER_STOP
            if not await self._router.stop(grace):
                log.warning("the router did not end within %g s and was killed", grace)
        await asyncio.gather(*(shard.stop(_SHARD_STOP) for shard in self._shards if shard.alive))
        if self._store is not None:
            await self._store.stop()
