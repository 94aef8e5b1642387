"""The control socket of a running worker: its owner asks what it does, has it pause and go on.

One JSON object a line each way: `{"do": "status" | "pause" | "resume"}`, answered with the worker's `State`. The socket is a
file that only its owner can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from headrace._common.errors import StartupError
from headrace_router.network.agent import Agent

log = logging.getLogger(__name__)

LONGEST = 4096  # bytes of a question


class Question(Struct):
    do: Literal["status", "pause", "resume"]


class State(Struct):
    """What a worker does. `name` is how its owner tells it from others on the machine."""

    name: str
    gateway: str
    model: str
    connected: bool
    slots: int
    running: int  # jobs
    done: int  # jobs since the start; those that went elsewhere are not among them
    tokens: int  # since the start
    resting: str | None  # why no new jobs are taken


class Control:
    """Listens for the owner of this worker."""

    def __init__(self, path: str, name: str, agent: Agent) -> None:
        self._path, self._name, self._agent = Path(path), name, agent
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Make the socket, for this user alone; its folder is the user's.

        Raises:
            StartupError: it cannot be made.
        """
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._answer, self._path, limit=LONGEST)
        except OSError as error:
            raise StartupError(f"cannot make the control socket {self._path}: {error.strerror or error}") from None
        finally:
            os.umask(before)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    def _state(self) -> State:
        agent = self._agent
        return State(
            self._name, agent.gateway, agent.model.id, agent.connected, agent.lender.slots, agent.running, agent.tally.done,
            agent.tally.tokens, agent.lender.reason,
        )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError):  # a line that is too long is a ValueError
            while line := await reader.readline():
                try:
                    question = msgspec.json.decode(line, type=Question)
                except msgspec.MsgspecError as error:
                    writer.write(msgspec.json.encode({"error": str(error)}) + b"\n")
                    continue
                if question.do != "status":
                    self._agent.pause(question.do == "pause")
                writer.write(msgspec.json.encode(self._state()) + b"\n")
                await writer.drain()
        writer.close()
