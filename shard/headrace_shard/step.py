"""What one forward pass works on: a flat, ragged batch of tokens. Generated tokens come first, then those of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence: flat rows `offset`..`offset + length`, positions `start`..`start + length`."""

    offset: int
    length: int
    start: int
    table: npt.NDArray[np.int32]  # [blocks] of the sequence, up to its last token


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's tokens.

    Attributes:
        token_ids, positions, slots: [tokens]; a slot is the place of the token's K and V in the cache, in tokens.
        decode_tables: [decode rows, blocks], padded with the null block.
        decode_lengths: [decode rows] tokens to attend to, the new one included.
        chunks: what comes after the decode rows: chunks of generated tokens, then of prompts.
        logit_rows: flat rows whose logits are wanted, ascending.
        prompts: how many of the flat rows, the last ones, are tokens of prompts.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    decode_tables: npt.NDArray[np.int32]
    decode_lengths: Ints
    chunks: tuple[Chunk, ...]
    logit_rows: Ints
    prompts: int = 0
