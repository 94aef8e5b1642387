"""From a model folder to something that runs steps: backend, weights, KV memory, and the warm-up."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_shard.backends import choose_backend
from headrace_shard.backends.base import Backend
from headrace_shard.draft import DraftModel
from headrace_shard.kernels.build import BuildFailed
from headrace_shard.kv.blocks import BLOCK_SIZE
from headrace_shard.kv.capacity import Limits, free_memory, limits
from headrace_shard.models import Model, family_of, load_model
from headrace_shard.parallel.distributed import DistributedGroup
from headrace_shard.parallel.group import Alone, Group, first_line
from headrace_shard.parallel.shared_memory import SharedMemoryGroup
from headrace_shard.roofline import Roofline, measure
from headrace_shard.sampling.passes import Passes
from headrace_shard.settings import DTYPES, ShardSettings
from headrace_shard.step import Chunk, StepInput
from headrace_shard.weights import open_weights
from headrace_shard.weights.precision import GROUP, OWN, precision_of

log = logging.getLogger(__name__)
ROWS = 256  # requests that run at once, unless settings say otherwise
STEP_TOKENS = {"cpu": 256, "cuda": 4096}
STEP_DEADLINE = 10.0  # seconds, or this many times the warm-up's step if that is more:
STEP_DEADLINE_FACTOR = 20
UNBOUNDED = 131072  # window in tokens of a model whose config names none
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model, or one rank's part of it, that is ready to run, and what was found while it was made so."""

    model: Model
    passes: Passes
    prompts_differ: bool  # see `Backend`
    group: Group
    limits: Limits
    rows: int
    max_step_tokens: int
    dtype: str
    quantization: str  # 4- or 8-bit format of most weights; empty: they are in 16 or 32 bits
    device: str
    roofline: Roofline
    warmup_seconds: float
    slowest_step: float
    step_deadline: float
    draft: DraftModel | None


def meet(settings: ShardSettings, rendezvous: str, device: torch.device, threads: int) -> Group:
    """The group of all ranks, each of so many threads.

    Raises:
        StartupError: not all ranks came.
    """
    rank, world_size = settings.rank, settings.num_shard
    if world_size == 1:
        return Alone()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return DistributedGroup(rank, world_size, rendezvous, device)
    try:
        return SharedMemoryGroup(rank, world_size, Path(rendezvous), threads)
    except BuildFailed as error:
        log.info("%s: the ranks exchange their sums over gloo instead of shared memory", error)
        return DistributedGroup(rank, world_size, rendezvous, device)


def load(
    settings: ShardSettings, folder: ModelFolder, rendezvous: str,
    meet: Callable[[ShardSettings, str, torch.device, int], Group] = meet,
) -> Loaded:
    """Meet the other ranks, load the weights, reserve the KV cache, run one small step.

    Raises:
        StartupError: the model, its files or the limits do not allow it; one line.
        GroupBroken: another rank did not get that far.
    """
    device = torch.device("cuda", settings.rank) if torch.cuda.is_available() else torch.device("cpu")
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.num_shard)
    check_shards(folder, settings.num_shard)
    group = meet(settings, rendezvous, device, threads)
    weights = open_weights(folder)
    precision = precision_of(settings.dtype, settings.quantize)
    backend = choose_backend(precision, device, group, threads, settings.max_cpu_isa or "")
    with torch.inference_mode():
        try:
            model = load_model(folder, weights, backend, settings.rank, settings.num_shard)
            weights.release()
            if settings.quantize:
                check_quantized(settings.quantize, backend, folder)
            rows = settings.max_batch_size or ROWS
            draft = load_draft(settings, device, threads)
            found = agree(group, _limits(settings, folder, model, backend, device, rows, draft))
            backend.allocate_kv(model.layers, found.blocks, model.attention)
            if draft is not None:
                draft.backend.allocate_kv(draft.model.layers, found.draft_blocks, draft.model.attention)
        except (RuntimeError, MemoryError) as error:  # torch's and numpy's own
            raise StartupError(f"rank {settings.rank} cannot load {folder.path}: {first_line(error)}") from error
        roofline = measure(backend, group)
        start = time.perf_counter()
        slowest = _warm_up(model) + (_warm_up(draft.model) if draft else 0.0)
        deadline = group.limit(max(STEP_DEADLINE, STEP_DEADLINE_FACTOR * slowest))
    dtype, quantization = described(backend)
    return Loaded(
        model, backend.passes, backend.prompts_differ, group, found, rows,
        settings.max_step_tokens or STEP_TOKENS[device.type], settings.dtype or dtype, quantization, device.type, roofline,
        time.perf_counter() - start, slowest, deadline,
        DraftModel(draft.model, draft.window, found.draft_blocks) if draft else None,
    )


@dataclass(frozen=True)
class LoadedDraft:
    """The draft model, before there is a KV cache for it. `window`: its longest sequence, in tokens."""

    model: Model
    backend: Backend
    window: int


def load_draft(settings: ShardSettings, device: torch.device, threads: int) -> LoadedDraft | None:
    """The draft model, its weights as its files have them: whole, on the leading rank alone.

    Raises:
        StartupError: it cannot be served.
    """
    if not settings.draft_model_folder or not settings.drafts or settings.rank:
        return None
    folder = ModelFolder.open(settings.draft_model_folder)
    check_shards(folder, 1)
    weights = open_weights(folder)
    backend = choose_backend(OWN, device, Alone(), threads, settings.max_cpu_isa or "")
    model = load_model(folder, weights, backend)
    weights.release()
    held = " + ".join(name for name, _ in backend.packed.most_common())
    log.info("draft model: weights %s, %.0f MB a pass", held, backend.packed.total() / 1e6)
    return LoadedDraft(model, backend, folder.max_positions or UNBOUNDED)


def _token_bytes(model: Model, backend: Backend) -> int:
    """Bytes of K and V of one token over all layers."""
    shape = model.attention
    return 2 * model.layers * shape.kv_heads * shape.head_dim * backend.kv_dtype(shape).itemsize


def described(backend: Backend) -> tuple[str, str]:
    """(data type, 4- or 8-bit format or "") of most weights; what is not held in floats is computed with in float32."""
    formats = [name for name, _ in backend.packed.most_common()]
    packed = [name.lower() for name in formats if name not in DTYPES]
    return ("float32" if packed else formats[0]), (packed[0] if packed else "")


def check_quantized(wanted: str, backend: Backend, folder: ModelFolder) -> None:
    """Say so if `--quantize` has nothing to pack.

    Raises:
        StartupError: nothing can be packed.
    """
    formats = set(backend.packed)
    if formats <= set(DTYPES):
        raise StartupError(f"--quantize {wanted}: no matrix of {folder.path} has columns in whole groups of {GROUP}")
    if not formats & {"int8", "q4"}:
        held = " and ".join(sorted(formats))
        log.warning("--quantize %s changes nothing: the weights are %s already", wanted, held)


def check_shards(folder: ModelFolder, world_size: int) -> None:
    """Refuse a number of ranks that the model cannot be cut into, before they wait for each other.

    Raises:
        StartupError: names both numbers.
    """
    family_of(folder).check_partition(folder.text_config, world_size)


def _limits(
    settings: ShardSettings, folder: ModelFolder, model: Model, backend: Backend, device: torch.device, rows: int,
    draft: LoadedDraft | None,
) -> Limits:
    # The ranks of a CPU group share one memory, which each of them sees whole.
    free = free_memory() // settings.num_shard if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    drafts = _token_bytes(draft.model, draft.backend) if draft else 0
    return limits(settings, folder.max_positions or UNBOUNDED, _token_bytes(model, backend), free, rows, drafts)


def agree(group: Group, found: Limits) -> Limits:
    """Rank 0's limits, which hold for all: it has the largest part of the KV heads."""
    values = torch.tensor([found.max_input_tokens, found.max_total_tokens, found.blocks])
    longest, total, blocks = group.broadcast(values).tolist()
    return Limits(longest, total, blocks, found.explanation, found.draft_blocks)


def _warm_up(model: Model) -> float:
    """Run one small mixed step; returns its seconds."""
    start = time.perf_counter()
    tokens = BLOCK_SIZE
    table = np.ones(1, dtype=np.int32)
    positions = np.arange(tokens, dtype=np.int64)
    step = StepInput(
        token_ids=np.zeros(tokens, dtype=np.int64), positions=positions, slots=BLOCK_SIZE + positions,
        decode_tables=np.zeros((0, 0), dtype=np.int32), decode_lengths=np.zeros(0, dtype=np.int64),
        chunks=(Chunk(0, tokens, 0, table),), logit_rows=np.array([tokens - 1], dtype=np.int64), prompts=tokens,
    )
    logits = model.forward(step)
    if not bool(torch.isfinite(logits).all()):
        raise StartupError("the model's logits are not finite numbers: the weights are damaged, or the dtype is too small")
    return time.perf_counter() - start
