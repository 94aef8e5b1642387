"""A model that says what it is told to say, through the whole real service: exact cases of any length and form.

It is a Llama of one layer that copies. Its attention looks at one place only, a fixed number of tokens back, and the head
names the token that it finds there. The chat template ends the prompt with what is to be said, padded to just that length: so
every step says the next token of it, then the end token. A grammar that leaves no choice cannot bring it out of step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
HEADS, HEAD = 4, 64
HIDDEN = HEADS * HEAD
THETA = 100.0  # of the rotary embedding: small, so that all its frequencies tell places apart
SHARPNESS = 4000.0  # weight of the attention's one place against its neighbours
LOUDNESS = 8.0  # of what is found there against the token itself


def write_parrot(folder: Path, scripts: Mapping[str, str], otherwise: str = "Hello.", vocab_size: int = 1000) -> Path:
    """Write a model to `folder` that answers a conversation whose last message is a key of `scripts` with its value. A key that
    begins with "tools: " is for calls that offer tools.

    Args:
        otherwise: what it says to everything else.
        vocab_size: tokens at most; they are learned from the scripts, so that they span words and markup as they come.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = {**scripts, "": otherwise}
    tokenizer = _learned(list(said.values()), vocab_size)
    counts = {key: len(tokenizer.encode(text, add_special_tokens=False).ids) for key, text in said.items()}
    back = max(counts.values()) + 1
    padded = {key: text + SPECIALS[EOS] * (back - counts[key]) for key, text in said.items()}
    tokenizer.save(str(folder / "tokenizer.json"))
    _dump(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[1], "eos_token": SPECIALS[EOS],
        "clean_up_tokenization_spaces": False, "chat_template": _template(padded),
    })
    size = tokenizer.get_vocab_size()
    _dump(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": HEAD, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "head_dim": HEAD, "vocab_size": size, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": THETA,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": EOS,
        "torch_dtype": "float32",
    })
    _dump(folder / "generation_config.json", {"eos_token_id": EOS})
    save_file(_weights(size, back - 1), folder / "model.safetensors", {"format": "pt"})
    return folder


def _learned(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level tokenizer of these texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=12,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
    ))
    return made


def _template(padded: dict[str, str]) -> str:
    """A special token stands before what is to be said, so that its tokens are its own."""
    table = ", ".join(f"{_literal(key)}: {_literal(text)}" for key, text in padded.items())
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        f"<|im_start|>assistant\n{SPECIALS[0]}{{% set said = {{{table}}} %}}{{% set asked = messages[-1].content %}}"
        "{{ said['tools: ' + asked] if tools and 'tools: ' + asked in said else said[asked] if asked in said else said[''] }}"
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _weights(vocab_size: int, back: int) -> dict[str, npt.NDArray[np.float32]]:
    """Tokens are random signs, the first of them the same in all: what queries and keys are made of. `back`: how many places
    before the present one the attention looks.
    """
    rng = np.random.default_rng(7)
    codes = rng.choice(np.array([-1.0, 1.0]), (vocab_size, HIDDEN))
    codes[:, 0] = 1.0
    turns = back / THETA ** (np.arange(HEAD // 2) * 2 / HEAD)
    query, key = np.zeros((HEADS, HEAD, HIDDEN)), np.zeros((HEADS, HEAD, HIDDEN))
    key[:, : HEAD // 2, 0] = 1.0
    query[:, : HEAD // 2, 0], query[:, HEAD // 2 :, 0] = SHARPNESS * np.cos(turns), -SHARPNESS * np.sin(turns)
    at = "model.layers.0."
    made = {
        "model.embed_tokens.weight": codes, "model.norm.weight": np.ones(HIDDEN),
        f"{at}input_layernorm.weight": np.ones(HIDDEN), f"{at}post_attention_layernorm.weight": np.ones(HIDDEN),
        f"{at}self_attn.q_proj.weight": query.reshape(HIDDEN, HIDDEN),
        f"{at}self_attn.k_proj.weight": key.reshape(HIDDEN, HIDDEN),
        f"{at}self_attn.v_proj.weight": np.eye(HIDDEN), f"{at}self_attn.o_proj.weight": LOUDNESS * np.eye(HIDDEN),
        f"{at}mlp.gate_proj.weight": np.zeros((HEAD, HIDDEN)), f"{at}mlp.up_proj.weight": np.zeros((HEAD, HIDDEN)),
        f"{at}mlp.down_proj.weight": np.zeros((HIDDEN, HEAD)),
    }
    return {name: value.astype(np.float32) for name, value in made.items()}


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), "utf-8")
