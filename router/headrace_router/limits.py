"""What the service accepts: the operator's limits, checked against the shard's."""

from __future__ import annotations

from dataclasses import dataclass

from headrace._common.errors import StartupError
from headrace.v1 import generation_pb2 as pb
from headrace_router.settings import RouterSettings


@dataclass(frozen=True)
class Limits:
    """Limits of requests, in tokens where nothing else is said."""

    max_input_tokens: int
    max_total_tokens: int
    max_batch_size: int  # requests
    vocab_size: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_client_batch_size: int  # prompts


def find_limits(settings: RouterSettings, info: pb.InfoResponse) -> Limits:
    """The limits that hold.

    Raises:
        StartupError: the settings ask for more than the shard serves, or contradict each other.
    """
    total = settings.max_total_tokens or info.max_total_tokens
    if total > info.max_total_tokens:
        raise StartupError(
            f"--max-total-tokens {total} is more than the {info.max_total_tokens} that the shard serves"
        )
    given = settings.max_input_tokens
    if given is not None and given >= total:
        raise StartupError(f"--max-input-tokens {given} must be less than --max-total-tokens {total}")
    if given is not None and given > info.max_input_tokens:
        raise StartupError(f"--max-input-tokens {given} is more than the {info.max_input_tokens} that the shard serves")
    return Limits(
        max_input_tokens=given or min(total - 1, info.max_input_tokens),
        max_total_tokens=total,
        max_batch_size=min(settings.max_batch_size or info.max_batch_size, info.max_batch_size),
        vocab_size=info.vocab_size,
        max_best_of=settings.max_best_of,
        max_stop_sequences=settings.max_stop_sequences,
        max_top_n_tokens=settings.max_top_n_tokens,
        max_client_batch_size=settings.max_client_batch_size,
    )
