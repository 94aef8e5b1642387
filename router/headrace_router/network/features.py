"""What workers can do beside greedy and sampled text, as their hello says, in the words of `text_output.needs`."""

from __future__ import annotations

from collections.abc import Collection

from headrace._common.grammars import KINDS
from headrace_router.network.frames import TEXT, Model

# of every worker that takes token ids
ALWAYS = frozenset({
    "temperature", "top_k", "top_p", "typical_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "ignore_eos", "stop_token_ids", "min_tokens", "shown_tokens", "bare_prompt",
})
# what is needed, by the features that promise it
PROMISES = {
    "watermark": {"watermark"}, "top_n": {"top_n_tokens"}, "top_n_tokens": {"top_n_tokens"},
    "prompt_logprobs": {"prompt_logprobs"}, "grammar": {f"grammar.{kind}" for kind in KINDS},
}
RESUME = "resume"  # it goes on exactly after the tokens of others


def offered(model: Model) -> frozenset[str]:
    """What a job may need that goes to this worker."""
    if TEXT in model.features:
        return frozenset(model.features)
    return ALWAYS.union(*(PROMISES.get(feature, ()) for feature in model.features))


def resumes(features: Collection[str]) -> bool:
    """Does a worker with these features go on exactly after the tokens of others, and others after its own?"""
    return RESUME in features and TEXT not in features
