"""The router's side of the gRPC boundary alone: its Batcher in a process of its own, without HTTP.

    python -m bench.receiver --target unix:PATH --model-folder FOLDER

Runs rounds of equal requests against a shard and prints one JSON object: for each round the tokens per second that the
Batcher took from the boundary, detokenized and put into the streams of its requests; and this process's CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import time
from pathlib import Path

import uvloop

from headrace._common.tokenizing import Tokenizer
from headrace_router.batcher import Batcher
from headrace_router.limits import find_limits
from headrace_router.metrics import Metrics
from headrace_router.settings import RouterSettings
from headrace_router.shard_client import ShardClient
from headrace_router.streams import TokenStream
from headrace_router.types import GenerateRequest

CONNECT_SECONDS = 30.0
PROMPT = list(range(40, 56))


class Collector:
    """Takes tokens out of streams as soon as they are there: nothing piles up, and no task has to wake for it."""

    def __init__(self, streams: list[TokenStream]) -> None:
        self._streams = self._running = len(streams)
        self._tokens = self._at_begin = 0
        self._began = self._ended = 0.0  # time.perf_counter()
        self._end = asyncio.Event()
        for stream in streams:
            stream.on_arrival(functools.partial(self._take, stream))

    def _take(self, stream: TokenStream) -> None:
        tokens = stream.take()
        self._tokens += len(tokens)
        if not self._began and self._tokens >= self._streams:
            self._began, self._at_begin = time.perf_counter(), self._tokens
        if tokens and tokens[-1].end is not None:
            self._running -= 1
            if not self._running:
                self._ended = time.perf_counter()
                self._end.set()

    async def rate(self) -> float:
        """Wait for the end; tokens per second since each stream had one."""
        await self._end.wait()
        return (self._tokens - self._at_begin) / (self._ended - self._began)


async def receive(target: str, folder: Path, requests: int, tokens: int, rounds: int) -> list[float]:
    """Tokens per second of each round."""
    shard = ShardClient(target)
    await shard.connect(CONNECT_SECONDS)
    limits = find_limits(RouterSettings(), shard.info)
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
    batcher = Batcher(shard, Tokenizer(folder / "tokenizer.json"), limits, metrics)
    batcher.start()
    rates = []
    for _ in range(rounds):
        streams = [batcher.submit(GenerateRequest(PROMPT, tokens)) for _ in range(requests)]
        rates.append(await Collector(streams).rate())
    await batcher.close("done")
    await shard.close()
    return rates


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="unix:PATH or HOST:PORT of a shard")
    parser.add_argument("--model-folder", type=Path, required=True, help="where tokenizer.json is")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000, help="of each request")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    before = time.process_time()
    rates = uvloop.run(receive(given.target, given.model_folder, given.requests, given.tokens, given.rounds))
    print(json.dumps({"rates": rates, "cpu_seconds": time.process_time() - before}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
