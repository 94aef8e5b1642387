"""What a device backend supplies. Models are written against this and run on every device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace_shard.parallel.partition import Runs
from headrace_shard.sampling.passes import Passes
from headrace_shard.step import StepInput
from headrace_shard.weights.precision import Precision
from headrace_shard.weights.source import Blocks, Dense, Table

Part = torch.Tensor | Blocks | Dense  # a matrix [out, in] as weights give it; a tensor stands for itself in float32


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one attention layer. `window`: tokens that a query sees, itself included; None = all before it."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None


class Backend(Protocol):
    """Fused operations over the flat token rows of one step, and the packing of weights for them.

    `x` is the residual stream [tokens, hidden]; weights are what `pack_*` returned. In a group of several ranks each
    holds its part of the weights; `embed`, `output`, `mlp` and `head` do the collectives that their parts need.
    """

    device: torch.device  # on which everything of a step lies
    passes: Passes  # over the logits
    precision: Precision  # in which it takes matrices

    @property
    def packed(self) -> Counter[str]:
        """Bytes of the matrices that it has packed, by their format; a step reads each once."""

    @property
    def prompts_differ(self) -> bool:
        """Whether rows of prompts are computed in other numerics than those of generated tokens."""

    def pack_linear(
        self, parts: Sequence[Part], biases: Sequence[torch.Tensor] | None = None, runs: Runs | None = None
    ) -> Any:
        """Weights [out, in] of one or more linear layers over the same input, run as one.

        `runs`: of a row-parallel layer; in what order to sum, for a backend whose ranks agree in the last bit.
        """

    def pack_norm(self, weight: torch.Tensor, epsilon: float) -> Any:
        """Weight [hidden] of an RMS norm."""

    def pack_embedding(self, table: Table, ids: range) -> Any:
        """The embedding table [vocab, hidden], of which this rank need only answer for these token ids."""

    def read_rate(self, wait: Callable[[], object]) -> float:
        """Bytes per second at which this process reads its packed matrices from memory, tried once; 0: not known.

        `wait` is called right before and after it, within the time: ranks that read at once wait for each other there.
        """

    def kv_dtype(self, shape: AttentionShape) -> torch.dtype:
        """Data type of the KV cache of such layers."""

    def allocate_kv(self, layers: int, blocks: int, shape: AttentionShape) -> None:
        """Reserve the KV cache: `blocks` blocks, numbers 1..blocks, and the null block."""

    def begin(self, step: StepInput, inverse_frequencies: torch.Tensor) -> None:
        """Prepare what all layers of the step share: rotary angles, gather indices, masks."""

    def embed(self, table: Any) -> torch.Tensor:
        """Rows of the step's token ids: [tokens, hidden]."""

    def run(self, layers: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """`layers(x)`, with the same function at every step: a backend may record what it calls here, and repeat that."""

    def norm_qkv(self, x: torch.Tensor, norm: Any, qkv: Any) -> torch.Tensor:
        """[tokens, (heads + 2 kv_heads) head_dim]."""

    def attention(self, qkv: torch.Tensor, layer: int, shape: AttentionShape) -> torch.Tensor:
        """Rotate q and k, write k and v into the cache, attend: [tokens, heads head_dim]."""

    def output(self, x: torch.Tensor, attended: torch.Tensor, projection: Any) -> torch.Tensor:
        """x plus the projected attention output; may be written into x."""

    def mlp(self, x: torch.Tensor, norm: Any, gate_up: Any, down: Any) -> torch.Tensor:
        """x plus down(silu(gate) up) of the normed x; may be written into x."""

    def head(self, x: torch.Tensor, norm: Any, head: Any) -> torch.Tensor:
        """Logits of the rows that the step wants: [logit rows, padded vocab], float32; on rank 0 alone they are whole.

        Their memory may be that of the next step's.
        """
