"""`transformers.generate` behind /v1/completions: what waits together is one batch.

On a CPU this is faster than the continuous batching of `transformers serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from bench.peers.serving.completions import StaticBatches, options, serve


class Steps(BaseStreamer):  # type: ignore[misc]  # the package has no types here
    """Receives the prompts first, then the tokens of each step: [batch]."""

    def __init__(self, emit: Callable[[int, int], None]) -> None:
        self._emit, self._prompts = emit, True

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`."""
        if not self._prompts:
            for index, token in enumerate(value.tolist()):
                self._emit(index, token)
        self._prompts = False

    def end(self) -> None:
        """Called by `generate`."""


def main() -> None:
    """Load the model and serve it."""
    given = options(__doc__ or "").parse_args()
    torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # end tokens do not end it

    def generate(prompts: Sequence[list[int]], tokens: int, emit: Callable[[int, int], None]) -> None:
        if len({len(prompt) for prompt in prompts}) > 1:
            raise ValueError("prompts of several lengths: no padding here")
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                pad_token_id=0, streamer=Steps(emit),
            )

    serve(StaticBatches(generate), given.tokenizer, given.port)


if __name__ == "__main__":
    main()
