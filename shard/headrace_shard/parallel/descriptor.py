"""A step as one flat tensor of integers, so that followers run it and know nothing else.

    [kind, length, decode rows, table width, chunks, logit rows, tokens, tokens of prompts]
    token ids, positions, slots, decode tables, decode lengths, logit rows, and for each chunk: offset, length, start,
    blocks, block numbers
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from headrace_shard.step import Chunk, Ints, StepInput


class Broadcasting(Protocol):
    """The part of a group that a message needs."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x into every rank's x."""


IDLE, STEP, STOP = range(3)
HEADER = 8
INLINE = 4096  # integers that travel with the header; a longer step takes a second message


def encode(step: StepInput) -> Ints:
    """The step's integers, header first."""
    chunks = [
        np.concatenate(([c.offset, c.length, c.start, len(c.table)], c.table)).astype(np.int64) for c in step.chunks
    ]
    body = np.concatenate((
        step.token_ids, step.positions, step.slots, step.decode_tables.reshape(-1).astype(np.int64),
        step.decode_lengths, step.logit_rows, *chunks,
    ))
    width = step.decode_tables.shape[1] if len(step.decode_lengths) else 0
    head = [
        STEP, len(body), len(step.decode_lengths), width, len(chunks), len(step.logit_rows), len(step.token_ids),
        step.prompts,
    ]
    return np.concatenate((np.array(head, dtype=np.int64), body))


def decode(values: Ints) -> StepInput:
    """The step of `encode`'s integers."""
    _, _, rows, width, chunks, logits, tokens, prompts = values[:HEADER].tolist()
    at = HEADER

    def take(count: int) -> Ints:
        nonlocal at
        at += count
        return values[at - count : at]

    token_ids, positions, slots = take(tokens), take(tokens), take(tokens)
    tables = take(rows * width).reshape(rows, width).astype(np.int32)
    lengths, wanted = take(rows), take(logits)
    parts = []
    for _ in range(chunks):
        offset, length, start, blocks = take(4).tolist()
        parts.append(Chunk(offset, length, start, take(blocks).astype(np.int32)))
    return StepInput(token_ids, positions, slots, tables, lengths, tuple(parts), wanted, prompts)


def send(group: Broadcasting, values: Ints) -> None:
    """`Group.send` where a message's size has to be known before it comes."""
    first = np.zeros(HEADER + INLINE, dtype=np.int64)
    first[: min(len(values), len(first))] = values[: len(first)]
    group.broadcast(torch.from_numpy(first))
    if len(values) > len(first):
        group.broadcast(torch.from_numpy(np.ascontiguousarray(values[len(first) :])))


def receive(group: Broadcasting) -> Ints:
    """`Group.receive` of what `send` sends."""
    first = torch.zeros(HEADER + INLINE, dtype=torch.int64)
    values = group.broadcast(first).numpy()
    total = HEADER + int(values[1])
    if total <= len(values):
        return values[:total]
    rest = group.broadcast(torch.zeros(total - len(values), dtype=torch.int64)).numpy()
    return np.concatenate((values, rest))


def note(kind: int) -> Ints:
    """The header of a message without a step."""
    return np.array([kind] + [0] * (HEADER - 1), dtype=np.int64)
