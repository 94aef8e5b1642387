"""Tiny models made on the spot, for tests of every process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, seed: int = 7, parts: int = 1, **changes: Any) -> Path:
    """Write a random Llama with a byte-level tokenizer (every byte a token) to `folder`; `changes` go into its config.

    `parts` > 1 spreads the weights over that many files with an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**TINY, **changes}
    _dump(folder / "config.json", config)
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    _dump(folder / "generation_config.json", ids)
    _write_tokenizer(folder, config["vocab_size"])
    tensors = random_tensors(config, seed)
    if parts == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    where = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(where.values())):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file, {"format": "pt"})
    _dump(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    return folder


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a Llama-like model, named as transformers names it."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        made |= {
            f"{at}input_layernorm.weight": (hidden,), f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (queries, hidden), f"{at}self_attn.k_proj.weight": (keys, hidden),
            f"{at}self_attn.v_proj.weight": (keys, hidden), f"{at}self_attn.o_proj.weight": (hidden, queries),
            f"{at}mlp.gate_proj.weight": (inner, hidden), f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen2":
            made |= {f"{at}self_attn.q_proj.bias": (queries,), f"{at}self_attn.k_proj.bias": (keys,)}
            made |= {f"{at}self_attn.v_proj.bias": (keys,)}
    made["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = (config["vocab_size"], hidden)
    return made


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Weights that give a peaked, varied next-token distribution."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes(config).items():
        scale = 1.0 if "embed" in name else 0.25
        made[name] = np.ones(shape, np.float32) if "norm" in name else rng.normal(0, scale, shape).astype(np.float32)
    return made


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate((*SPECIALS, *alphabet))}
    for number in range(len(vocab), vocab_size):
        vocab[f"<filler-{number}>"] = number
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    made.save(str(folder / "tokenizer.json"))
    _dump(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[1], "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[2], "clean_up_tokenization_spaces": False, "chat_template": CHATML,
    })


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), "utf-8")
