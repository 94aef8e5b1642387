"""The connection to the leading shard: calls, facts, and whether it is well."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import grpc
import grpc.aio

from headrace._common.errors import StartupError
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_pb2_grpc

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
ANSWER_SECONDS = 2.0  # a Health call without an answer for so long is a bad one
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


def _stub(channel: grpc.aio.Channel) -> generation_pb2_grpc.GenerationAsyncStub:
    stub: Any = generation_pb2_grpc.GenerationStub(channel)
    return cast("generation_pb2_grpc.GenerationAsyncStub", stub)


class ShardClient:
    """A channel to one shard, its `Info`, and its health, which a task asks for every second."""

    info: pb.InfoResponse
    capacity: pb.WarmupResponse

    def __init__(self, target: str) -> None:
        self.target = target
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self.stub = _stub(self._channel)
        self.problem: str | None = "not connected yet"
        self._poller: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self.problem is None

    async def connect(self, patience: float) -> None:
        """Wait up to `patience` seconds for a good Health, then read Info and the capacity, and keep asking for Health.

        Raises:
            StartupError: the shard was not well in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while not await self._ask():
            if loop.time() > deadline:
                raise StartupError(f"the shard at {self.target} does not answer: {self.problem}")
            await asyncio.sleep(0.05)
        try:
            self.info = await self.stub.Info(pb.InfoRequest(), timeout=ANSWER_SECONDS)
            self.capacity = await self.stub.Warmup(pb.WarmupRequest(), timeout=patience)
        except grpc.aio.AioRpcError as error:
            raise StartupError(f"the shard at {self.target} does not say what it serves: {error.details()}") from None
        self._poller = asyncio.create_task(self._poll(), name="shard-health")

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            before = self.problem
            await self._ask()
            if self.problem != before:
                log.warning("shard at %s: %s", self.target, self.problem or "well again")

    async def _ask(self) -> bool:
        try:
            await self.stub.Health(pb.HealthRequest(), timeout=ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            self.problem = f"{error.code().name}: {error.details()}"
            return False
        self.problem = None
        return True

    def report(self, problem: str) -> None:
        """A call has shown that the shard is not well; the next good Health answer clears it."""
        self.problem = problem

    async def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
        await self._channel.close()
