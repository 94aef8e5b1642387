"""The shard's own work between two forward passes: all that a loop could hide which prepares a step while another runs.

The real executor decodes with the default model, in this process and without a client. Of each step the forward pass and the
sampling, which needs its logits, are taken away; what is left is planning and bookkeeping. The plain loop does that after the
one step and before the next. Messages are made on another thread, while the next step runs, in either loop.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from bench.figures import Figure, Result
from bench.processes import embedded_model
from headrace._common.model_folder import ModelFolder
from headrace_launcher.bench.stats import median
from headrace_shard.batch import RunningBatch
from headrace_shard.calls import Call
from headrace_shard.executor import Delivery, Executor
from headrace_shard.kv.blocks import BlockManager
from headrace_shard.loading import Loaded, load
from headrace_shard.requests import Request, StepResult
from headrace_shard.settings import ShardSettings
from headrace_shard.step import StepInput

ROWS = (1, 8, 32)
STEPS, ROUNDS = 100, 5
PROMPT = 128


class TimedRunner:
    """Runs steps on the loaded model and adds up their seconds."""

    heartbeat: float | None = None

    def __init__(self, loaded: Loaded) -> None:
        self._model, self.seconds = loaded.model, 0.0

    def forward(self, step: StepInput) -> torch.Tensor:
        begin = time.perf_counter()
        logits = self._model.forward(step)
        self.seconds += time.perf_counter() - begin
        return logits

    def idle(self) -> None:
        """There are no other ranks."""

    def stop(self) -> None:
        """There are no other ranks."""


def measure() -> Result:
    """The rest of a step beside its whole, for each number of rows."""
    folder = ModelFolder.open(embedded_model())
    settings = ShardSettings(model_folder=str(folder.path), max_batch_total_tokens=32 * 512, max_total_tokens=1024)
    result = Result("host", setup={"prompt": PROMPT, "steps": STEPS, "rounds": ROUNDS})
    loaded = load(settings, folder, "")
    with torch.inference_mode():
        for rows in ROWS:
            steps, rests = zip(*(decode(loaded, rows) for _ in range(ROUNDS)), strict=True)
            shares = [rest / step for step, rest in zip(steps, rests, strict=True)]
            result.figures += [
                Figure(f"step of {rows}", "ms", median(steps), samples=steps),
                Figure(f"neither forward nor sampling, {rows}", "ms", median(rests), samples=rests),
                Figure(f"share that overlapping could hide, {rows}", "ratio", median(shares), samples=tuple(shares)),
            ]
    return result


def decode(loaded: Loaded, rows: int) -> tuple[float, float]:
    """Milliseconds of a decode step, and those of them that are neither its forward pass nor its sampling."""
    runner, sampled = TimedRunner(loaded), 0.0

    def deliver(delivery: Delivery) -> None:
        nonlocal sampled
        for call, item in delivery:
            assert isinstance(item, StepResult), item
            sampled += item.timings.sample
            call.delivered += 1

    batch = RunningBatch(rows, PROMPT + STEPS + 64)
    executor = Executor(
        runner, batch, BlockManager(loaded.limits.blocks), eos_ids=frozenset(), vocab_size=loaded.model.vocab_size,
        max_step_tokens=loaded.max_step_tokens, batch_lease=60.0, deliver=deliver, step_deadline=60.0, passes=loaded.passes,
        prefix_caching=False,
    )
    generator = np.random.default_rng(rows)
    prompts = generator.integers(3, loaded.model.vocab_size, (rows, PROMPT), dtype=np.int32)
    executor.submit(Call("bench", (0,), tuple(Request(i + 1, prompts[i], 0, STEPS + 32) for i in range(rows))))
    while executor.advance():
        pass
    executor.submit(Call("bench", (1,), max_steps=STEPS + 8))
    for _ in range(8):
        executor.advance()
    runner.seconds = sampled = 0.0
    begin = time.perf_counter()
    for _ in range(STEPS):
        assert executor.advance()
    whole = time.perf_counter() - begin
    return whole / STEPS * 1000, (whole - runner.seconds - sampled) / STEPS * 1000
