"""From a model folder to something that runs steps: backend, weights, KV memory, and the warm-up."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_shard.backends import choose_backend
from headrace_shard.kv.blocks import BLOCK_SIZE
from headrace_shard.kv.capacity import Limits, free_memory, limits
from headrace_shard.models import Model, load_model
from headrace_shard.settings import ShardSettings
from headrace_shard.step import Chunk, StepInput
from headrace_shard.weights import open_weights

ROWS = 256  # requests that run at once, unless settings say otherwise
STEP_TOKENS = {"cpu": 256, "cuda": 4096}
UNBOUNDED = 131072  # window in tokens of a model whose config names none


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run, and what was found while it was made so."""

    model: Model
    limits: Limits
    rows: int
    max_step_tokens: int
    dtype: str
    device: str
    warmup_seconds: float
    slowest_step: float


def load(settings: ShardSettings, folder: ModelFolder) -> Loaded:
    """Load the weights, reserve the KV cache, run one small step.

    Raises:
        StartupError: the model, its files or the limits do not allow it; one line.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = settings.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    backend = choose_backend(getattr(torch, dtype), device)
    with torch.inference_mode():
        model = load_model(folder, open_weights(folder), backend)
        shape = model.attention
        token_bytes = 2 * model.layers * shape.kv_heads * shape.head_dim * getattr(torch, dtype).itemsize
        rows = settings.max_batch_size or ROWS
        free = free_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        found = limits(settings, folder.max_positions or UNBOUNDED, token_bytes, free, rows)
        backend.allocate_kv(model.layers, found.blocks, shape)
        start = time.perf_counter()
        slowest = _warm_up(model)
    return Loaded(
        model, found, rows, settings.max_step_tokens or STEP_TOKENS[device.type], dtype, device.type,
        time.perf_counter() - start, slowest,
    )


def _warm_up(model: Model) -> float:
    """Run one small mixed step; returns its seconds."""
    start = time.perf_counter()
    tokens = BLOCK_SIZE
    table = np.ones(1, dtype=np.int32)
    positions = np.arange(tokens, dtype=np.int64)
    step = StepInput(
        token_ids=np.zeros(tokens, dtype=np.int64), positions=positions, slots=BLOCK_SIZE + positions,
        decode_tables=np.zeros((0, 0), dtype=np.int32), decode_lengths=np.zeros(0, dtype=np.int64),
        chunks=(Chunk(0, tokens, 0, table),), logit_rows=np.array([tokens - 1], dtype=np.int64),
    )
    logits = model.forward(step)
    if not bool(torch.isfinite(logits).all()):
        raise StartupError("the model's logits are not finite numbers: the weights are damaged, or the dtype is too small")
    return time.perf_counter() - start
