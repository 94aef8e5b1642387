"""How many KV blocks the memory of this machine holds: computed, never tried out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace._common.errors import StartupError
from headrace_shard.kv.blocks import BLOCK_SIZE, blocks_for
from headrace_shard.settings import ShardSettings

CPU_SHARE = 0.25  # of the memory that is free once the weights are loaded
DRAFT_ROWS = 8  # requests of the longest kind that the draft model's cache holds: guesses pay where few requests run


@dataclass(frozen=True)
class Limits:
    """What a shard can hold. `explanation` tells how `blocks` came about; `draft_blocks` are the draft model's."""

    max_input_tokens: int
    max_total_tokens: int
    blocks: int
    explanation: str
    draft_blocks: int = 0


def limits(
    settings: ShardSettings, max_positions: int, token_bytes: int, free_bytes: int, rows: int, draft_bytes: int = 0
) -> Limits:
    """Blocks and sequence limits from the settings, the model's window and the memory.

    Args:
        max_positions: the model's window in tokens.
        token_bytes: KV bytes of one token over all layers.
        free_bytes: memory that is free now.
        rows: requests that run at once; more memory than they can fill is not taken.
        draft_bytes: of one token in the draft model's cache; 0: there is none.

    Raises:
        StartupError: a limit is above the window, or one request of the longest kind would not fit.
    """
    total = settings.max_total_tokens
    memory = int(free_bytes * CPU_SHARE)
    drafts = DRAFT_ROWS * blocks_for(total or max_positions) if draft_bytes else 0
    if total is not None and total > max_positions:
        raise StartupError(f"--max-total-tokens {total} is more than the model's window of {max_positions} tokens")
    if settings.max_batch_total_tokens is not None:
        blocks = settings.max_batch_total_tokens // BLOCK_SIZE
        drafts = min(drafts, blocks)
        why = f"--max-batch-total-tokens {settings.max_batch_total_tokens}"
    else:
        useful = rows * blocks_for(total or max_positions)
        drafts = min(drafts, useful, memory // ((token_bytes + draft_bytes) * BLOCK_SIZE))  # not more than the model's
        blocks = min(useful, (memory - drafts * draft_bytes * BLOCK_SIZE) // (token_bytes * BLOCK_SIZE))
        why = (
            f"{CPU_SHARE:.0%} of {free_bytes / 2**30:.1f} GiB free memory at {token_bytes / 1024:.1f} KiB a token"
            if blocks < useful else f"{rows} requests of {total or max_positions} tokens"
        )
    capacity = blocks * BLOCK_SIZE
    if total is None:
        total = min(max_positions, capacity)
    elif total > capacity:
        raise StartupError(f"--max-total-tokens {total} does not fit into the KV cache of {capacity} tokens ({why})")
    if total < 2:
        raise StartupError(f"the KV cache holds {capacity} tokens, too few for one request ({why})")
    longest = settings.max_input_tokens if settings.max_input_tokens is not None else total - 1
    if longest >= total:
        raise StartupError(f"--max-input-tokens {longest} must be less than --max-total-tokens {total}")
    if drafts:
        why += f"; {drafts * BLOCK_SIZE} tokens for the draft model"
    return Limits(longest, total, blocks, f"{capacity} tokens: {why}", drafts)


def free_memory() -> int:
    """Bytes that this process may still take: the machine's available memory, or the container's if that is less."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))
