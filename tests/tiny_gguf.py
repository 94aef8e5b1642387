"""Tiny quantized GGUF models made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.models import TINY, random_tensors, write_tiny_model

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(folder: Path, layers: str, table: str = "Q8_0", seed: int = 7, **changes: Any) -> Path:
    """A model folder whose weights are a GGUF with layers of one format ("Q4_1", "F16", ...) and a table of another."""
    import gguf

    config = {**TINY, **changes}
    write_tiny_model(folder, seed, **changes)
    (folder / "model.safetensors").unlink()
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for name, values in random_tensors(config, seed).items():
        data = values
        for which, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
            if which in name:  # as llama.cpp stores them
                data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        kind = "F32" if data.ndim == 1 else layers if ".layers." in name else table
        to = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(_name(name), gguf.quants.quantize(np.ascontiguousarray(data), to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def _name(name: str) -> str:
    parts = name.split(".")
    if ".layers." in name:
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:-1])]}.weight"
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    return outside.get(name, "output.weight")
