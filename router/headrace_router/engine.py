"""The one interface of everything that stands behind the APIs."""

from __future__ import annotations

import asyncio
from typing import Protocol

from headrace.v1 import generation_pb2 as pb
from headrace_router.streams import TokenStream
from headrace_router.tenants import Tenant
from headrace_router.types import GenerateRequest


class Engine(Protocol):
    """Runs requests. Batchers, sets of replicas, caches, upstream servers and worker networks are engines."""

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Accept a request. Its stream carries tokens and exactly one terminal event: an end, or an error.

        Closing the stream before that cancels the request.
        """
        ...


class Core(Engine, Protocol):
    """The engine behind all others of a router."""

    def start(self) -> list[asyncio.Task[None]]:
        """Start its tasks, which never end by themselves: one that does has failed."""
        ...

    async def close(self, reason: str) -> None:
        """Fail what runs and waits, and stop."""
        ...

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the waiting requests may take."""
        ...

    def wait(self, workload: str, tenant: Tenant) -> float:
        """Seconds that a new request will be in the queue, if it has to wait at all."""
        ...

    @property
    def backlog(self) -> int:
        """Requests in the queue beyond those that there are free places for."""
        ...

    @property
    def running(self) -> int:
        """Requests that have a place."""
        ...

    @property
    def running_tokens(self) -> int:
        """Tokens that the running requests may grow to."""
        ...


class Backend(Protocol):
    """What runs the model: its facts, and whether it is well."""

    info: pb.InfoResponse
    capacity: pb.WarmupResponse

    @property
    def problem(self) -> str | None:
        """Why it is not well."""
        ...

    @property
    def healthy(self) -> bool: ...

    async def connect(self, patience: float) -> None:
        """
        Raises:
            StartupError: it was not well in time, in seconds.
        """
        ...

    async def close(self) -> None: ...
