"""What steps cost, learnt from recent ones: how many prompt or draft tokens to add to a step follows from it."""

from __future__ import annotations

from headrace_shard.kv.blocks import BLOCK_SIZE
from headrace_shard.requests import Timings

DRAFT_PRICE = 0.25  # of a step without draft tokens, until one has been measured
WEIGHT = 0.2  # of the newest step


class Mean:
    """A moving average; 0 until there is a sample."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, sample: float) -> None:
        self.value += (sample - self.value) * (WEIGHT if self.value else 1.0)


class Pace:
    """Seconds of the decode rows, of each prompt or draft token beside them, and of the draft model's passes."""

    def __init__(self) -> None:
        self._decode, self._per_token, self._per_draft = Mean(), Mean(), Mean()
        self._round, self._catch_up = Mean(), Mean()

    def learn(self, timings: Timings) -> None:
        """Take in one step's timings."""
        seconds = timings.total - timings.draft
        extra = max(0.0, seconds - (self._decode.value if timings.decode_tokens else 0.0))
        if timings.prefill_tokens:
            if timings.prefill_tokens >= BLOCK_SIZE:  # what fewer take is mostly what any step takes
                self._per_token.add(extra / timings.prefill_tokens)
        elif timings.draft_tokens:
            if self._decode.value:
                self._per_draft.add(extra / timings.draft_tokens)
        elif timings.decode_tokens:
            self._decode.add(seconds)

    def learn_draft(self, seconds: float, rows: int, tokens: int) -> None:
        """Take in one pass of the draft model over so many tokens, of so many rows."""
        if tokens <= 2 * rows:
            self._round.add(seconds)
        else:
            self._catch_up.add(max(0.0, seconds - self._round.value) / tokens)

    def prompt_tokens(self, target: float) -> int:
        """Prompt tokens that fit beside the decode rows in `target` seconds.

        Where the decode rows alone need most of it, prompts get as long again: a target that is too short for the batch
        must not starve them.
        """
        if not self._per_token.value:
            return BLOCK_SIZE
        return max(BLOCK_SIZE, int(max(target - self._decode.value, self._decode.value) / self._per_token.value))

    def draft_price(self) -> float:
        """What one draft token costs to verify, as a part of a step without any."""
        return self._share(self._per_draft.value) or DRAFT_PRICE

    def round_price(self) -> float:
        """What one pass of the draft model costs, one token a row, as a part of such a step."""
        return self._share(self._round.value) or DRAFT_PRICE

    def catch_up_price(self) -> float:
        """What one token costs that the draft model takes in, as a part of such a step; 0 until that was measured."""
        return self._share(self._catch_up.value)

    def _share(self, seconds: float) -> float:
        return seconds / self._decode.value if self._decode.value else 0.0
