"""POST /v1/completions for engines that have no server: token ids in, one event for each step's tokens out.

An engine runs on a thread of its own and puts tokens into the streams of its requests. Only what the load client needs
is here: greedy, exactly `max_tokens` tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web
from tokenizers import Tokenizer

GATHER_SECONDS = 0.004  # between the arrivals of requests that were sent together


@dataclass(eq=False)
class Stream:
    """One request: what goes in, and the tokens that come out of the engine's thread."""

    prompt: list[int]
    max_tokens: int
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue[list[int]] = field(default_factory=asyncio.Queue)

    def put(self, tokens: list[int]) -> None:
        """Add tokens; from any thread. An empty list says that there will be no more."""
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, tokens)


class Engine(Protocol):
    """Runs streams until each has had its tokens; `waiting` is filled from another thread."""

    def run(self, waiting: queue.SimpleQueue[Stream]) -> None:
        """Never returns."""


class StaticBatches:
    """For engines that take a list of prompts at once: what waits together is one batch, and the next waits for its end."""

    def __init__(self, generate: Callable[[Sequence[list[int]], int, Callable[[int, int], None]], None]) -> None:
        """`generate(prompts, tokens, emit)` calls emit(index of the prompt, token) as tokens come."""
        self._generate = generate

    def run(self, waiting: queue.SimpleQueue[Stream]) -> None:
        """Never returns."""
        while True:
            batch = gather(waiting)
            left = [stream.max_tokens for stream in batch]

            def emit(index: int, token: int, batch: list[Stream] = batch, left: list[int] = left) -> None:
                if left[index]:
                    left[index] -= 1
                    batch[index].put([token])

            try:
                self._generate([stream.prompt for stream in batch], max(left), emit)
            finally:
                for stream in batch:
                    stream.put([])


def gather(waiting: queue.SimpleQueue[Stream]) -> list[Stream]:
    """Wait for a request, then take those that came with it, until none has come for GATHER_SECONDS."""
    batch = [waiting.get()]
    while True:
        try:
            batch.append(waiting.get(timeout=GATHER_SECONDS))
        except queue.Empty:
            return batch


def make_app(tokenizer: Tokenizer, waiting: queue.SimpleQueue[Stream]) -> web.Application:
    """The routes. Requests go into `waiting`."""

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        stream = Stream(body["prompt"], body["max_tokens"], asyncio.get_running_loop())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        waiting.put(stream)
        count = 0
        while count < stream.max_tokens and (tokens := await stream.tokens.get()):
            count += len(tokens)
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            await response.write(event({"choices": [{"index": 0, "text": text}]}))
        usage = {"prompt_tokens": len(stream.prompt), "completion_tokens": count}
        await response.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions), web.get("/health", health)])
    return app


def event(data: dict[str, Any]) -> bytes:
    """One Server-Sent Event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def serve(engine: Engine, tokenizer_folder: Path, port: int) -> None:
    """Serve on loopback until the process is stopped."""
    waiting: queue.SimpleQueue[Stream] = queue.SimpleQueue()
    app = make_app(Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")), waiting)
    threading.Thread(target=_run, args=(engine, waiting), daemon=True).start()
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def _run(engine: Engine, waiting: queue.SimpleQueue[Stream]) -> None:
    try:
        engine.run(waiting)
    finally:  # an engine that failed has printed why; nobody would end its streams
        os._exit(1)


def options(doc: str) -> argparse.ArgumentParser:
    """Of every engine: --model, --tokenizer, --port, --threads."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the engine's model")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    return parser

