"""TGI's x-... response headers."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_router.service import Service, Ticket
from headrace_router.types import End


def compute_headers(service: Service, characters: int) -> dict[str, str]:
    """What is known before the first token. `characters`: length of the prompt."""
    return {"x-compute-type": service.shard.info.device or "cpu", "x-compute-characters": str(characters)}


def time_headers(ticket: Ticket, ends: Sequence[End], prompt_tokens: int) -> dict[str, str]:
    """What is known at the end. Times are in whole milliseconds, `x-compute-time` in seconds; the longest of several
    requests counts, output tokens are summed. `prompt_tokens`: of all prompts of the call. `x-cached-tokens`: of the prompt
    that found most of itself in the prefix cache.
    """
    inference = max(end.inference_seconds for end in ends)
    tokens = sum(end.generated_tokens for end in ends)
    milliseconds = {
        "x-total-time": ticket.seconds, "x-validation-time": ticket.validated or 0.0,
        "x-queue-time": max(end.queue_seconds for end in ends), "x-inference-time": inference,
        "x-time-per-token": inference / max(tokens, 1),
    }
    return {
        "x-compute-time": f"{ticket.seconds:.6f}", **{name: str(int(s * 1000)) for name, s in milliseconds.items()},
        "x-prompt-tokens": str(prompt_tokens), "x-generated-tokens": str(tokens),
        "x-cached-tokens": str(max(end.cached_tokens for end in ends)),
    }
