"""Milliseconds a forward pass takes on this machine's CPU, beside what reading the weights alone would take.

`python -m bench.kernels`: the embedded model in its own weights, or another folder or data type. The best of several
repeats is printed next to the median: on a machine with other work the best one is the kernels' own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.machine import facts
from headrace._common.model_folder import ModelFolder
from headrace_launcher.bench.stats import median
from headrace_shard.kv.blocks import BLOCK_SIZE, blocks_for
from headrace_shard.loading import Loaded, load
from headrace_shard.settings import DTYPES, QUANTIZATIONS, ShardSettings
from headrace_shard.step import Chunk, StepInput

CONTEXT = 192
READ_BYTES = 512 << 20  # far more than any cache holds


def decode_step(rows: int, context: int, vocab: int) -> StepInput:
    """One token of each of `rows` sequences, with `context` tokens to attend to."""
    blocks = blocks_for(context)
    tables = np.arange(1, rows * blocks + 1, dtype=np.int32).reshape(rows, blocks)
    positions = np.full(rows, context - 1, dtype=np.int64)
    slots = tables[:, -1].astype(np.int64) * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    ids = np.random.default_rng(rows).integers(0, vocab, rows, dtype=np.int64)
    return StepInput(ids, positions, slots, tables, positions + 1, (), np.arange(rows, dtype=np.int64))


def prefill_step(length: int, vocab: int) -> StepInput:
    """A whole prompt as one chunk; logits of its last token."""
    positions = np.arange(length, dtype=np.int64)
    table = np.arange(1, blocks_for(length) + 1, dtype=np.int32)
    ids = np.random.default_rng(length).integers(0, vocab, length, dtype=np.int64)
    return StepInput(
        ids, positions, BLOCK_SIZE + positions, np.zeros((0, 0), dtype=np.int32), np.zeros(0, dtype=np.int64),
        (Chunk(0, length, 0, table),), positions[-1:], prompts=length,
    )


def timed(loaded: Loaded, step: StepInput, seconds: float) -> list[float]:
    """Milliseconds of each forward pass, for about so many seconds."""
    loaded.model.forward(step)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        loaded.model.forward(replace(step))
        times.append((time.perf_counter() - begin) * 1000)
    return times


def read_bandwidth(threads: int) -> float:
    """Bytes per second that sums over a large array read, all threads together; the best of a few."""
    torch.set_num_threads(threads)
    data = torch.ones(READ_BYTES // 4)
    best = 0.0
    for _ in range(7):
        begin = time.perf_counter()
        data.sum()
        best = max(best, READ_BYTES / (time.perf_counter() - begin))
    torch.set_num_threads(1)
    return best


def weight_bytes(folder: ModelFolder, dtype: str | None) -> int:
    """Bytes of weights that a token's step reads. The embedding is read as the head, or not at all."""
    assert folder.gguf is not None
    from headrace_shard.weights.dequantize import block_layout
    from headrace_shard.weights.gguf import GgufWeights

    total = 0
    for name, entry in GgufWeights(folder.gguf, folder).entries.items():
        if name == "token_embd.weight" and not folder.text_config.get("tie_word_embeddings"):
            continue
        values, size = block_layout(entry.kind)
        total += int(np.prod(entry.shape)) * 4 if dtype else int(np.prod(entry.shape)) // values * size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--model-folder", help="the embedded model's if not given")
    parser.add_argument("--dtype", choices=DTYPES, help="float32 is the exact mode")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="what the weights are packed to")
    parser.add_argument("--threads", type=int, default=None, help="all cores if not given")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each row of the table")
    given = parser.parse_args()
    path = given.model_folder or subprocess.run(
        [sys.executable, "-c", "from headrace_launcher.cli import main; main()", "resolve"],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout.splitlines()[-1]
    folder = ModelFolder.open(Path(path))
    machine = facts()
    threads = given.threads or machine["cores"]
    settings = ShardSettings(
        model_folder=path, dtype=given.dtype, quantize=given.quantize, threads=threads, max_batch_total_tokens=32 * 256,
        max_total_tokens=4096,
    )
    loaded = load(settings, folder, "")
    print(f"{machine['cpu']}, {threads} threads, load {machine['load_before']}")
    print(loaded.roofline)
    floor = 1000 / loaded.roofline.tokens_per_second
    vocab = loaded.model.vocab_size
    steps = {f"decode {rows}, context {CONTEXT}": (decode_step(rows, CONTEXT, vocab), rows) for rows in (1, 8, 32)}
    steps |= {f"prefill {length}": (prefill_step(length, vocab), length) for length in (128, 256)}
    with torch.inference_mode():
        for name, (step, tokens) in steps.items():
            times = timed(loaded, step, given.seconds)
            print(
                f"{name:24} best {min(times):7.2f} ms, median {median(times):7.2f} ms, "
                f"{tokens / min(times) * 1000:6.0f} tokens/s, {floor / min(times):4.0%} of the reading rate"
            )


if __name__ == "__main__":
    main()
