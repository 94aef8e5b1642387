"""The connection to a Redis or Valkey server that keeps a broker's jobs, and outlives the server's restarts.

All that is asked of it is one script, `broker.lua`, by operation. Hints come by pub/sub; they may get lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from headrace._common.errors import BrokerUnavailable, StartupError
from headrace_router.network.jobs import Policy

try:
    from redis import exceptions
    from redis.asyncio import ConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
except ImportError:
    raise StartupError("--broker needs the package redis for this: pip install 'headrace[redis]'") from None

log = logging.getLogger(__name__)

SCRIPT = resources.files("headrace_router.network").joinpath("broker.lua").read_text("utf-8")
SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
OLDEST = 7  # major version of Redis; Valkey says 7 as well
CONNECTIONS = 32
ANSWER_SECONDS = 5.0
AGAIN_SECONDS = 0.05
IMPATIENT_SECONDS = 1.0  # for connections that a restart has cut
LOST = (
    exceptions.ConnectionError, exceptions.TimeoutError, exceptions.BusyLoadingError, exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError, exceptions.ClusterDownError, OSError,
)
Reply = tuple[Any, list[Any], list[Any]]  # what an operation returns, notes, and the state of the queue


def shown(url: str) -> str:
    """A store's URL without what is secret in it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


class Store:
    """One gateway's way to the store."""

    def __init__(
        self, url: str, prefix: str, gateway: str, policy: Policy, clock: Callable[[], float] | None = None,
        grace: float = 30.0,
    ) -> None:
        """`prefix`: of all keys; `clock`: in seconds, in place of the store's own; `grace`: seconds that it may be away.

        Raises:
            StartupError: the URL is none.
        """
        self.name, self._prefix, self._gateway = shown(url), prefix, gateway
        self._clock, self._grace = clock, grace
        self._policy = (
            policy.max_queue_size, policy.max_queue_tokens or 0,
            *(int(seconds * 1000) for seconds in (policy.max_queue_time, policy.max_run_time, policy.lease, policy.stall)),
            policy.max_attempts, int(policy.retention * 1000), policy.prompt_token * 1000, int(policy.gateway_silence * 1000),
        )
        try:
            pool = ConnectionPool.from_url(
                url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS, retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except ValueError as error:
            raise StartupError(f"--broker {self.name}: {error}") from None
        self._client = Redis(connection_pool=pool)
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._away_since: float | None = None  # time.monotonic()
        self.faults = 0  # answers that were lost

    @property
    def is_away(self) -> bool:
        return self._away_since is not None

    async def open(self, patience: float) -> None:
        """Reach the server, for so many seconds.

        Raises:
            StartupError: it cannot be reached, is too old, or throws away what it should keep.
        """
        end = time.monotonic() + patience
        while True:
            try:
                facts = await self._client.info("everything")
                break
            except LOST as error:
                if time.monotonic() >= end:
                    raise StartupError(f"--broker {self.name} cannot be reached: {error}") from None
                await asyncio.sleep(AGAIN_SECONDS)
            except exceptions.RedisError as error:
                raise StartupError(f"--broker {self.name}: {error}") from None
        version = str(facts["redis_version"])
        if int(version.partition(".")[0]) < OLDEST:
            raise StartupError(f"--broker {self.name} is Redis {version}; {OLDEST}.0 or later is needed, or Valkey")
        if (eviction := facts.get("maxmemory_policy", "noeviction")) != "noeviction":
            raise StartupError(
                f"--broker {self.name} evicts keys when memory is short (maxmemory-policy {eviction}): requests would be lost; "
                "set it to noeviction"
            )
        if not facts.get("aof_enabled"):
            log.warning("the broker %s has appendonly off: a restart of it loses the requests that it keeps", self.name)

    async def close(self) -> None:
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def call(self, operation: str, *args: Any, patient: bool = True) -> Reply:
        """Run an operation of the script. While the server is away this waits, or, if not `patient`, gives up.

        An operation whose answer was lost is run again: each of them may be.

        Raises:
            BrokerUnavailable: the server is away; for the patient, for longer than the grace.
        """
        began, tries = time.monotonic(), 0
        if self.is_away and not patient:
            raise self._unavailable()
        while True:
            try:
                reply: Reply = await self._evaluate(operation, args)
            except LOST as error:
                tries += 1
                self.faults += 1
                if tries == 1 and not isinstance(error, exceptions.TimeoutError):
                    continue  # it may be one connection alone, which somebody gave up in the middle of an answer
                self._lost(error)
                since = began + IMPATIENT_SECONDS if not patient else (self._away_since or began) + self._grace
                if time.monotonic() >= since:
                    raise self._unavailable() from None
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if self._away_since is not None:
                log.warning("the broker %s is back after %.1f s", self.name, time.monotonic() - self._away_since)
                self._away_since = None
            return reply

    async def _evaluate(self, operation: str, args: tuple[Any, ...]) -> Any:
        now = "" if self._clock is None else int(self._clock() * 1000)
        given = (1, self._prefix, operation, now, self._gateway, *self._policy, secrets.token_hex(8), *args)
        async with self._room:
            try:
                return await self._client.execute_command("EVALSHA", SHA, *given)  # type: ignore[no-untyped-call]
            except exceptions.NoScriptError:
                return await self._client.execute_command("EVAL", SCRIPT, *given)  # type: ignore[no-untyped-call]

    def _lost(self, error: Exception) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning("the broker %s does not answer: %s", self.name, error)

    def _unavailable(self) -> BrokerUnavailable:
        error = BrokerUnavailable("what keeps the requests does not answer")
        error.retry_after = 1.0
        return error

    async def hints(self, hear: Callable[[str, bytes], None], listening: Callable[[], None]) -> None:
        """Hear what is published for this gateway; never returns. `listening`: hints may have been missed until now."""
        bell = f"{self._prefix}:bell"
        while True:
            try:
                async with self._client.pubsub() as channel:
                    await channel.subscribe(bell, f"{self._prefix}:to:{self._gateway}")
                    listening()
                    async for message in channel.listen():
                        if message["type"] == "message":
                            hear("bell" if message["channel"].decode() == bell else "news", message["data"])
            except LOST:
                await asyncio.sleep(AGAIN_SECONDS)
