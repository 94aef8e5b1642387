"""CTranslate2's generator behind /v1/completions. It has no continuous batching: what waits together is one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ctranslate2
from tokenizers import Tokenizer

from bench.peers.serving.completions import StaticBatches, options, serve


def main() -> None:
    """Load the model and serve it."""
    given = options(__doc__ or "").parse_args()
    tokenizer = Tokenizer.from_file(str(given.tokenizer / "tokenizer.json"))
    generator = ctranslate2.Generator(
        str(given.model), device="cpu", compute_type="float32", intra_threads=given.threads, inter_threads=1
    )

    def generate(prompts: Sequence[list[int]], tokens: int, emit: Callable[[int, int], None]) -> None:
        def on_token(step: ctranslate2.GenerationStepResult) -> bool:
            emit(step.batch_id, step.token_id)
            return False

        generator.generate_batch(
            [[tokenizer.id_to_token(token) for token in prompt] for prompt in prompts], max_length=tokens, min_length=tokens,
            beam_size=1, sampling_topk=1, include_prompt_in_result=False, max_batch_size=0, callback=on_token,
        )

    serve(StaticBatches(generate), given.tokenizer, given.port)


if __name__ == "__main__":
    main()
