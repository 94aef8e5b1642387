"""Sampling parameters of one request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Watermark:
    """A green list of `gamma` of the vocabulary, whose logits get `delta` more (Kirchenbauer et al. 2023)."""

    gamma: float = 0.5
    delta: float = 2.0


@dataclass(frozen=True)
class SamplingParams:
    """All filters off and greedy by default. Applied in the order of the fields, on the processed logits."""

    watermark: Watermark | None = None
    repetition_penalty: float = 1.0  # Keskar et al. 2019, over prompt and output
    frequency_penalty: float = 0.0  # times the count in the output (OpenAI's definition)
    presence_penalty: float = 0.0  # once for each token in the output (OpenAI's definition)
    logit_bias: dict[int, float] = field(default_factory=dict)
    sampled: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # Holtzman et al. 2020; 1: off
    typical_p: float = 1.0  # Meister et al. 2023; 1: off
    min_p: float = 0.0  # Nguyen et al. 2024; 0: off
    seed: int = 0

    @property
    def processes(self) -> bool:
        """Whether the logits are changed before the choice."""
        return bool(
            self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty or self.logit_bias
            or self.watermark
        )

    @property
    def filters(self) -> bool:
        """Whether some tokens may not be drawn."""
        return bool(self.top_k or self.top_p < 1 or self.typical_p < 1 or self.min_p)
