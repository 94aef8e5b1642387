"""A model folder without weights: a small byte-level tokenizer whose tokens span words, and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ["the sky is blue and the sea is blue", "one two three four five six", "hello world, hello there"] * 20


def make_tokenizer() -> Tokenizer:
    """400 tokens: three special ones, every byte, and merges of a few English words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
    )
    made.train_from_iterator(_CORPUS, trainer)
    return made


def write_text_model(folder: Path, template: str | None = CHATML) -> Path:
    """Write config, tokenizer and template to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2]}
    if template is not None:
        settings["chat_template"] = template
    files = {
        "config.json": {"model_type": "llama", "max_position_embeddings": 1024}, "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": EOS_ID},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), "utf-8")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
