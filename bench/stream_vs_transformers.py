"""One stream and eight streams of the real service beside `transformers.generate`: same weights, float32, same threads.

The three take turns, so that a slow minute of the machine hits all of them alike. Every figure is output tokens over
the whole time of the answer, the prompt's included, and over HTTP on our side.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench.figures import Figure, Result
from bench.processes import embedded_model, roofline
from headrace._common.tokenizing import Tokenizer
from headrace_launcher.bench import load
from headrace_launcher.bench.prompts import numbered_list
from headrace_launcher.bench.stats import median
from tests.processes import Service

THREADS = 2
ROUNDS = 5
STREAMS = 8
INPUT_TOKENS = 128
OUTPUT_TOKENS = 128


class Transformers:
    """`transformers.generate` on the model folder's GGUF, dequantized to float32, as tests/reference loads it."""

    def __init__(self, folder: Path) -> None:
        os.environ["TQDM_DISABLE"] = "1"  # read when it is imported, which transformers does
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(THREADS)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # end tokens do not end it

    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Exactly so many tokens, greedily."""
        inputs = self._torch.tensor([prompt])
        with self._torch.inference_mode():
            out = self._model.generate(
                input_ids=inputs, attention_mask=self._torch.ones_like(inputs), do_sample=False, max_new_tokens=tokens,
                pad_token_id=0,
            )
        ids: list[int] = out[0, len(prompt) :].tolist()
        return ids


def measure() -> Result:
    """Let the three take turns."""
    setup = {
        "dtype": "float32", "threads": THREADS, "rounds": ROUNDS, "input_tokens": INPUT_TOKENS,
        "output_tokens": OUTPUT_TOKENS, "streams": STREAMS,
    }
    folder = embedded_model()
    result = Result("stream_vs_transformers", setup=setup)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    service = Service("--dtype", "float32", "--threads", str(THREADS))
    try:
        theirs = Transformers(folder)
        service.wait_ready()
        theirs.generate(prompt_ids(tokenizer, 0), 8)
        serve(service, [prompt_ids(tokenizer, 0)], 8)
        most = roofline(service.log())
        rates: dict[str, list[float]] = {"transformers": [], "one": [], "all": []}
        same = 0
        for turn in range(ROUNDS):
            prompts = [prompt_ids(tokenizer, turn * STREAMS + i) for i in range(STREAMS)]
            began = time.perf_counter()
            ids = theirs.generate(prompts[0], OUTPUT_TOKENS)
            rates["transformers"].append(OUTPUT_TOKENS / (time.perf_counter() - began))
            one = serve(service, prompts[:1])
            rates["one"].append(one.output_rate)
            same += one.answers[0].text == tokenizer.decode(ids)
            rates["all"].append(serve(service, prompts).output_rate)
    finally:
        service.stop()
    ratio = [a / b for a, b in zip(rates["one"], rates["transformers"], strict=True)]
    gain = [a / b for a, b in zip(rates["all"], rates["one"], strict=True)]
    result.figures = [
        Figure("transformers, one stream", "tokens/s", median(rates["transformers"]), samples=tuple(rates["transformers"])),
        Figure("one stream", "tokens/s", median(rates["one"]), samples=tuple(rates["one"])),
        Figure("eight streams, total", "tokens/s", median(rates["all"]), samples=tuple(rates["all"])),
        Figure("one stream / what memory allows", "x", median(rates["one"]) / most),
        Figure("one stream / transformers", "x", median(ratio), at_least=1.25, samples=tuple(ratio)),
        Figure("eight streams / one stream", "x", median(gain), at_least=3, samples=tuple(gain)),
    ]
    result.details = {"answers_with_the_text_of_transformers": f"{same} of {ROUNDS}", "memory_allows_tokens_per_second": most}
    return result


def prompt_ids(tokenizer: Tokenizer, seed: int) -> list[int]:
    """A prompt of INPUT_TOKENS tokens."""
    return tokenizer.encode(numbered_list(2 * INPUT_TOKENS, seed))[:INPUT_TOKENS]


def serve(service: Service, prompts: Sequence[load.Prompt], tokens: int = OUTPUT_TOKENS) -> load.Outcome:
    """All prompts at once.

    Raises:
        RuntimeError: an answer failed, or ended early, and so would make a figure of less work.
    """
    spec = load.Load(service.url, concurrency=len(prompts), output_len=tokens)
    outcome = uvloop.run(load.run(spec, prompts))
    short = [answer.tokens for answer in outcome.answers if answer.tokens != tokens]
    if outcome.errors() or short:
        raise RuntimeError(f"errors: {outcome.errors()}; answers of {short} instead of {tokens} tokens")
    return outcome
