"""Starting the processes in order, watching them, and stopping them in order.

    shards and router -> Health of every rank -> /health is 200 -> one line on stdout -> wait
    SIGTERM: router drains and ends -> shards end -> status 0.  A dead child: everything ends -> status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from headrace._common.errors import StartupError
from headrace_launcher import arguments, sockets
from headrace_launcher.arguments import Plan
from headrace_launcher.children import Child
from headrace_launcher.models.resolve import Resolved
from headrace_router.settings import RouterSettings

T = TypeVar("T")
log = logging.getLogger(__name__)

_POLL = 0.1  # seconds between looks at a starting process
_PROGRESS = 5.0  # seconds between lines about it
_SHARD_STOP = 5.0  # seconds that a shard gets to end after SIGTERM
_ROUTER_STOP = 5.0  # the same for the router when a shard is dead: nothing can be drained any more


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
        self._shards: list[Child] = []
        self._router: Child | None = None
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
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal)
        paths = sockets.prepare_prefix(self._prefix, self._plan.launcher.num_shard)
        dead: Child | None = None
        try:
            await self._start(paths)
            await self._guarded(asyncio.Event().wait())
        except _Stopped:
            log.info("stopping")
        except _Died as error:
            dead = error.child
        finally:
            await self._end(dead)
            sockets.remove(paths)
        if dead is not None:
            raise StartupError(dead.describe_end())
        if self._kill.is_set():
            raise StartupError("stopped at once by a second signal")

    def _on_signal(self) -> None:
        self._signals += 1
        (self._stop if self._signals == 1 else self._kill).set()

    async def _start(self, paths: list[Path]) -> None:
        plan, as_json = self._plan, self._plan.launcher.json_output
        log.info("starting %d shard%s for %s", len(paths), "s" * (len(paths) > 1), self._model.name)
        for rank in range(len(paths)):
            settings = dataclasses.replace(
                plan.shard, model_folder=str(self._model.folder), model_id=self._model.name, rank=rank,
                shard_uds_path=self._prefix,
            )
            command = arguments.shard_command(settings)
            self._shards.append(await Child.start(f"shard {rank}", command, self._env, as_json))
        target = f"unix:{paths[0]}"
        if plan.router is not None:  # it waits for the leading shard by itself, so its imports cost no time
            self._router = await self._spawn_router(plan.router, target)
        await self._guarded(self._progress("the shards load the model", _all_healthy(paths)))
        breakdown = self._shards[0].startup_times or "shard ready"
        router_url = None
        if plan.router is not None:
            before = time.monotonic()
            answers = _http_healthy(plan.router.hostname, plan.router.port)
            await self._guarded(self._progress("the router starts", answers))
            router_url = sockets.url(plan.router.hostname, plan.router.port)
            breakdown += f", router {time.monotonic() - before:.1f} s"
        self._announce(Started(self._model.name, router_url, target, time.monotonic() - self._began, breakdown))

    async def _spawn_router(self, router: RouterSettings, target: str) -> Child:
        settings = dataclasses.replace(
            router, model_folder=str(self._model.folder), model_id=self._model.name, model_sha=self._model.sha,
            shard_target=target,
        )
        as_json = self._plan.launcher.json_output
        return await Child.start("router", arguments.router_command(settings), self._env, as_json)

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

    async def _progress(self, what: str, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        begun = time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=_PROGRESS))[0]:
                log.info("%s (%.0f s)", what, time.monotonic() - begun)
            await task
        finally:
            task.cancel()

    async def _end(self, dead: Child | None) -> None:
        """Router first, then the shards; a second signal kills what is left."""
        stopping = asyncio.ensure_future(self._stop_in_order(dead))
        kill = asyncio.ensure_future(self._kill.wait())
        await asyncio.wait({stopping, kill}, return_when=asyncio.FIRST_COMPLETED)
        kill.cancel()
        children = [*self._shards, *([self._router] if self._router else [])]
        if not stopping.done():
            for child in children:
                child.kill()
        await stopping
        for child in children:
            child.kill()  # the rest of its process group

    async def _stop_in_order(self, dead: Child | None) -> None:
        if self._router is not None and self._router.alive:
            grace = self._plan.launcher.graceful_termination_timeout if dead is None else _ROUTER_STOP
            if not await self._router.stop(grace):
                log.warning("the router did not end within %g s and was killed", grace)
        await asyncio.gather(*(shard.stop(_SHARD_STOP) for shard in self._shards if shard.alive))


async def _all_healthy(paths: list[Path]) -> None:
    """Wait until every rank's Health is good. A rank that cannot load ends by itself, which the caller sees."""
    import grpc.aio  # here, while the shards import and load

    from headrace.v1 import generation_pb2, generation_pb2_grpc

    while not all(path.is_socket() for path in paths):  # noqa: ASYNC110 - another process makes them
        await asyncio.sleep(_POLL)
    for path in paths:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub: Any = generation_pb2_grpc.GenerationStub(channel)
            while True:
                try:
                    await stub.Health(generation_pb2.HealthRequest(), timeout=5.0, wait_for_ready=True)
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(_POLL)


async def _http_healthy(host: str, port: int) -> None:
    """Wait until GET /health answers 200."""
    while not await _answers(sockets.reachable(host), port):  # noqa: ASYNC110 - another process answers
        await asyncio.sleep(_POLL)


async def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status = (await reader.readline()).split()
                return len(status) > 1 and status[1] == b"200"
            finally:
                writer.close()
    return False
