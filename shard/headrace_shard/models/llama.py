"""Llama and the families of its shape: Mistral, Qwen2, SmolLM.

Grouped-query attention with rotary embedding, RMS norms before each block, SwiGLU feed-forward.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace._common.errors import StartupError
from headrace_shard.backends.base import AttentionShape, Backend
from headrace_shard.models.base import Model
from headrace_shard.models.rope import inverse_frequencies
from headrace_shard.parallel.partition import Partition, Runs, Shape
from headrace_shard.step import StepInput
from headrace_shard.weights import Blocks, Dense, WeightSource
from headrace_shard.weights.source import with_zero_rows

LOADING_THREADS = 2  # unpacking one layer while another is laid out


@dataclass(frozen=True)
class LlamaConfig:
    """The part of config.json that this family reads."""

    layers: int
    hidden: int
    intermediate: int
    vocab: int
    epsilon: float
    attention: AttentionShape
    windows: tuple[int | None, ...]  # of each layer
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool

    @property
    def shape(self) -> Shape:
        """What a partition over several ranks depends on."""
        a = self.attention
        return Shape(self.hidden, self.intermediate, self.vocab, a.heads, a.kv_heads, a.head_dim)

    @classmethod
    def read(cls, config: dict[str, Any]) -> LlamaConfig:
        """Raises StartupError if a field is missing or has a value that this family cannot serve."""
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            sizes = int(config["num_hidden_layers"]), hidden, int(config["intermediate_size"]), int(config["vocab_size"])
        except KeyError as error:
            raise StartupError(f"config.json has no {error.args[0]}") from None
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise StartupError(f"hidden_act {activation!r} in config.json is not supported; silu is")
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads:
            raise StartupError(f"num_attention_heads {heads} does not divide by num_key_value_heads {kv_heads}")
        qwen = config.get("model_type") == "qwen2"
        bias = qwen or bool(config.get("attention_bias", False))
        return cls(
            *sizes, float(config.get("rms_norm_eps", 1e-6)),
            AttentionShape(heads, kv_heads, int(config.get("head_dim") or hidden // heads)), _windows(config, sizes[0]),
            bias, bias and not qwen, bool(config.get("mlp_bias", False)), bool(config.get("tie_word_embeddings", False)),
        )


def _windows(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer, None = all that came before."""
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", config.get("model_type") != "qwen2"):
        return (None,) * layers
    if kinds := config.get("layer_types"):
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    full = int(config.get("max_window_layers", 0)) if config.get("model_type") == "qwen2" else 0
    return (None,) * full + (int(window),) * (layers - full)


@dataclass(frozen=True)
class Layer:
    """The packed weights of one layer."""

    attention: AttentionShape
    attention_norm: Any
    qkv: Any
    output: Any
    mlp_norm: Any
    gate_up: Any
    down: Any


class LlamaModel(Model):
    def __init__(
        self, config: dict[str, Any], weights: WeightSource, backend: Backend, rank: int, world_size: int
    ) -> None:
        self.config = LlamaConfig.read(config)
        self.layers, self.vocab_size = self.config.layers, self.config.vocab
        self._part = Partition.of(self.config.shape, rank, world_size)
        self.attention = replace(
            self.config.attention, heads=len(self._part.heads), kv_heads=len(self._part.kv_heads)
        )
        self._backend = backend
        self._frequencies = inverse_frequencies(config, self.attention.head_dim).to(backend.device)
        mine = range(min(self._part.vocab.start, self.vocab_size), min(self._part.vocab.stop, self.vocab_size))
        table = weights.table("model.embed_tokens.weight", (self.config.vocab, self.config.hidden))
        self._embedding = backend.pack_embedding(table, mine)
        with ThreadPoolExecutor(LOADING_THREADS) as pool:
            self._layers = list(pool.map(lambda i: self._load_layer(weights, i), range(self.layers)))
        self._norm = backend.pack_norm(weights.get("model.norm.weight", (self.config.hidden,)), self.config.epsilon)
        tied = self.config.tied or "lm_head.weight" not in weights.names()
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        self._head = backend.pack_linear([self._head_rows(weights, head, mine)])

    @classmethod
    def check_partition(cls, config: dict[str, Any], world_size: int) -> None:
        Partition.of(LlamaConfig.read(config).shape, 0, world_size)

    def _head_rows(self, weights: WeightSource, name: str, mine: range) -> Blocks | Dense:
        """This rank's rows of the head, [part of the padded vocabulary, hidden]; padding rows are zero."""
        size = (self.config.vocab, self.config.hidden)
        rows = weights.matrix(name, size, rows=mine, precision=self._backend.precision, head=True)
        missing = len(self._part.vocab) - len(mine)
        return with_zero_rows(rows, missing) if missing else rows

    def _load_layer(self, weights: WeightSource, number: int) -> Layer:
        c, part, at = self.config, self._part, f"model.layers.{number}."
        dim, precision = c.attention.head_dim, self._backend.precision
        sizes = {"q": c.attention.heads * dim, "k": c.attention.kv_heads * dim, "v": c.attention.kv_heads * dim}
        heads = range(part.heads.start * dim, part.heads.stop * dim)
        kv = range(part.kv_heads.start * dim, part.kv_heads.stop * dim)

        def column(block: str, outs: dict[str, tuple[int, range]], bias: bool) -> Any:
            """Cut along the outputs: each rank computes its rows of them."""
            weight = [
                weights.matrix(f"{at}{block}.{n}_proj.weight", (s, c.hidden), rows=r, precision=precision)
                for n, (s, r) in outs.items()
            ]
            if not bias:
                return self._backend.pack_linear(weight)
            biases = [weights.get(f"{at}{block}.{n}_proj.bias", (s,), rows=r) for n, (s, r) in outs.items()]
            return self._backend.pack_linear(weight, biases)

        def row(name: str, size: int, columns: range, runs: Runs, bias: bool) -> Any:
            """Cut along the inputs: the ranks' results are summed, so that one alone adds the bias."""
            weight = weights.matrix(f"{at}{name}_proj.weight", (c.hidden, size), columns=columns, precision=precision)
            mine = bias and part.rank == 0
            biases = [weights.get(f"{at}{name}_proj.bias", (c.hidden,))] if mine else None
            return self._backend.pack_linear([weight], biases, runs)

        def norm(name: str) -> Any:
            return self._backend.pack_norm(weights.get(f"{at}{name}.weight", (c.hidden,)), c.epsilon)

        inner = (c.intermediate, part.columns)
        layer = Layer(
            replace(self.attention, window=c.windows[number]), norm("input_layernorm"),
            column("self_attn", {"q": (sizes["q"], heads), "k": (sizes["k"], kv), "v": (sizes["v"], kv)}, c.qkv_bias),
            row("self_attn.o", sizes["q"], heads, part.head_runs, c.output_bias), norm("post_attention_layernorm"),
            column("mlp", {"gate": inner, "up": inner}, c.mlp_bias), row("mlp.down", *inner, part.column_runs, c.mlp_bias),
        )
        weights.release()
        return layer

    def forward(self, step: StepInput) -> torch.Tensor:
        ops = self._backend
        ops.begin(step, self._frequencies)
        x = ops.run(self._run_layers, ops.embed(self._embedding))
        return ops.head(x, self._norm, self._head)[:, : self.vocab_size]

    def _run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream [tokens, hidden] after all layers."""
        ops = self._backend
        for number, layer in enumerate(self._layers):
            qkv = ops.norm_qkv(x, layer.attention_norm, layer.qkv)
            x = ops.output(x, ops.attention(qkv, number, layer.attention), layer.output)
            x = ops.mlp(x, layer.mlp_norm, layer.gate_up, layer.down)
        return x
