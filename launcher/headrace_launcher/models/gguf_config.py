"""GGUF metadata as config.json and generation_config.json."""

from __future__ import annotations

import math
from typing import Any

from headrace._common.errors import StartupError
from headrace_launcher.models.gguf_header import Header

# GGUF architecture -> transformers' class. Mistral files say "llama".
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config(header: Header) -> dict[str, Any]:
    """config.json of a GGUF model.

    Raises:
        StartupError: the architecture is not supported, or the metadata lacks a value.
    """
    kind = header.architecture
    if kind not in ARCHITECTURES or header.get("expert_count"):
        what = f"{kind} with experts" if kind in ARCHITECTURES else kind or "none"
        raise StartupError(f"{header.path}: GGUF architecture {what} is not supported ({', '.join(ARCHITECTURES)} are)")
    heads, hidden = _need(header, "attention.head_count"), _need(header, "embedding_length")
    if isinstance(heads, list) or "token_embd.weight" not in header.tensors:
        raise StartupError(f"{header.path}: layers of differing shape, or no token embedding; that is not supported")
    made: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _need(header, "feed_forward_length"),
        "num_hidden_layers": _need(header, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "head_dim": header.get("attention.key_length") or header.get("rope.dimension_count") or hidden // heads,
        "max_position_embeddings": _need(header, "context_length"),
        "rms_norm_eps": _shortest(_need(header, "attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(header.get("rope.freq_base", 10000.0)),
        "vocab_size": header.tensors["token_embd.weight"].shape[1],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "float32",
    }
    if kind == "llama":
        made["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        made["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if scaling := _rope_scaling(header, made):
        made["rope_scaling"] = scaling
    return {**made, **_special_ids(header)}


def generation_config(header: Header) -> dict[str, Any]:
    """generation_config.json: the end tokens, of text and of turn, and the first and the padding token."""
    return _special_ids(header)


def _special_ids(header: Header) -> dict[str, Any]:
    def of(name: str) -> int | None:
        return header.metadata.get(f"tokenizer.ggml.{name}_token_id")

    ends = list(dict.fromkeys(i for i in (of("eos"), of("eot")) if i is not None))
    end = ends[0] if len(ends) == 1 else ends or None
    ids = {"bos_token_id": of("bos"), "eos_token_id": end, "pad_token_id": of("padding")}
    return {name: value for name, value in ids.items() if value is not None}


def _need(header: Header, key: str) -> Any:
    value = header.get(key)
    if value is None:
        raise StartupError(f"{header.path}: the metadata has no {header.architecture}.{key}")
    return value


def _shortest(value: float) -> float:
    """The decimal that a float32 was made of: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _rope_scaling(header: Header, made: dict[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, made)
    kind = header.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise StartupError(f"{header.path}: rope scaling {kind!r} is not supported (linear, yarn are)")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest(_need(header, "rope.scaling.factor"))}
    original = header.get("rope.scaling.original_context_length")
    if kind == "yarn" and original:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(header: Header, made: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1's rope scaling, which GGUF stores as one divisor per frequency.

    The file does not hold the parameters that the divisors came from; the released ones are tried and compared.
    """
    divisors = header.floats("rope_freqs.weight")
    scaling: dict[str, Any] = {
        "rope_type": "llama3", "factor": _shortest(max(divisors)), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_divisors(made["rope_theta"], made["head_dim"], scaling)
    if len(expected) != len(divisors) or any(abs(a - b) > 1e-3 * b for a, b in zip(divisors, expected, strict=True)):
        raise StartupError(f"{header.path}: its rope_freqs.weight are not Llama 3.1's; that is not supported")
    return scaling


def llama3_divisors(theta: float, head_dim: int, scaling: dict[str, Any]) -> list[float]:
    """What each rope frequency is divided by: transformers' `_compute_llama3_parameters`, inverted."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
