#!/usr/bin/env python3
"""Make reference.json: what `transformers` answers, greedily and in float32, with the embedded model's weights.

    python tests/reference/make_reference.py MODEL_FOLDER     # as `headrace resolve` prints it

For each prompt: its token ids, 64 output ids (end tokens do not end it), and at each output token the distance between
the two best logits, so that a test can tell a rounding tie from an error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time in a land far away there was",
    "def fibonacci(n):\n    ",
    "1 2 3 4 5 6",
    "Hello, my name is",
    "A",
    "Water boils at a temperature of",
    "List three fruits:\n1.",
    "SELECT name FROM users WHERE",
    "In 1969, the first humans",
    "Q: What is the largest planet?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Ein kurzer Satz auf Deutsch:",
    "Les trois couleurs du drapeau sont",
    "日本の首都は",
    "🙂🙃 Emoji mean",
    "<|im_start|>user\nWrite a haiku about rivers.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n",
    "To be, or not to be, that is the question:",
    "import numpy as np\n\n\ndef softmax(x):\n    \"\"\"",
]


def main(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    rows = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        out = model.generate(
            **inputs, max_new_tokens=TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True,
            pad_token_id=0,
        )
        start = inputs.input_ids.shape[1]
        best = [logits[0].topk(2).values.tolist() for logits in out.logits]
        rows.append({
            "prompt": prompt, "input_ids": inputs.input_ids[0].tolist(), "output_ids": out.sequences[0, start:].tolist(),
            "gaps": [round(a - b, 5) for a, b in best],
        })
        print(repr(tokenizer.decode(rows[-1]["output_ids"])), flush=True)
    (HERE / "reference.json").write_text("[\n" + ",\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
