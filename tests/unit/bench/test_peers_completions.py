"""The HTTP server around engines that have none, read by the load client."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer

from bench.peers.serving.completions import StaticBatches, Stream, gather, make_app
from bench.peers.workloads import Workload, check, rates
from headrace_launcher.bench import load
from tests.models import write_tiny_model


def count_up(prompts: Sequence[list[int]], tokens: int, emit: Callable[[int, int], None]) -> None:
    """An engine that answers n, n + 1, ... to a prompt that begins with n, and does not stop where it should."""
    for step in range(tokens + 3):
        for index, prompt in enumerate(prompts):
            emit(index, prompt[0] + step)


async def test_every_stream_has_its_own_tokens_and_exactly_so_many(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tiny_model(tmp_path) / "tokenizer.json"))
    waiting: queue.SimpleQueue[Stream] = queue.SimpleQueue()
    threading.Thread(target=StaticBatches(count_up).run, args=(waiting,), daemon=True).start()
    async with TestServer(make_app(tokenizer, waiting)) as server:
        spec = load.Load(str(server.make_url("")), concurrency=3, output_len=4, ignore_eos=True)
        outcome = await load.run(spec, [[40, 1], [60, 1], [80, 1]])
    workload = Workload("x", 3, 2, 4)
    check(workload, outcome.answers)
    assert [answer.text for answer in outcome.answers] == [
        "".join(tokenizer.decode([first + i], skip_special_tokens=False) for i in range(4)) for first in (40, 60, 80)
    ]
    assert rates(workload, outcome).output > 0


async def test_what_is_sent_together_is_one_batch() -> None:
    waiting: queue.SimpleQueue[Stream] = queue.SimpleQueue()
    loop = asyncio.get_running_loop()
    streams = [Stream([n], 1, loop) for n in range(3)]
    for stream in streams:
        waiting.put(stream)
    assert gather(waiting) == streams
