"""What steps cost, learnt from recent ones: how many prompt or draft tokens to add to a step follows from it."""

from __future__ import annotations

from headrace_shard.kv.blocks import BLOCK_SIZE
from headrace_shard.requests import Timings

DRAFT_PRICE = 0.25  # of a step without draft tokens, until one has been measured


class Pace:
    """Seconds of the decode rows, and of each prompt or draft token beside them: moving averages."""

    WEIGHT = 0.2  # of the newest step

    def __init__(self) -> None:
        self._decode = 0.0
        self._per_token = 0.0
        self._per_draft = 0.0

    def learn(self, timings: Timings) -> None:
        """Take in one step's timings."""
        extra = max(0.0, timings.total - (self._decode if timings.decode_tokens else 0.0))
        if timings.prefill_tokens:
            self._per_token += (extra / timings.prefill_tokens - self._per_token) * (self.WEIGHT if self._per_token else 1.0)
        elif timings.draft_tokens:
            if self._decode:
                cost = extra / timings.draft_tokens
                self._per_draft += (cost - self._per_draft) * (self.WEIGHT if self._per_draft else 1.0)
        elif timings.decode_tokens:
            self._decode += (timings.total - self._decode) * (self.WEIGHT if self._decode else 1.0)

    def prompt_tokens(self, target: float) -> int:
        """Prompt tokens that fit beside the decode rows in `target` seconds.

        Where the decode rows alone need most of it, prompts get as long again: a target that is too short for the batch
        must not starve them.
        """
        if not self._per_token:
            return BLOCK_SIZE
        return max(BLOCK_SIZE, int(max(target - self._decode, self._decode) / self._per_token))

    def draft_price(self) -> float:
        """What one draft token costs, as a part of a step without any."""
        return self._per_draft / self._decode if self._per_draft and self._decode else DRAFT_PRICE
