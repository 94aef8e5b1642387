"""What the memory allows at most: a step of one stream reads every weight once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_shard.backends.base import Backend
from headrace_shard.parallel.group import Group

PASSES = 7  # of reading: at most 0.2 s in all


@dataclass(frozen=True)
class Roofline:
    """Of a whole shard group, whose ranks read at the same time.

    Attributes:
        formats: those of the weights, the one with most bytes first.
        step_bytes: weights that a step reads, over all ranks.
        bytes_per_second: at which the ranks together read them; 0 if it was not measured.
    """

    formats: tuple[str, ...]
    step_bytes: float
    bytes_per_second: float

    @property
    def tokens_per_second(self) -> float:
        """Of one stream, at most; 0 if it is not known."""
        return self.bytes_per_second / self.step_bytes

    def __str__(self) -> str:
        text = f"weights {' + '.join(self.formats)}, {self.step_bytes / 1e6:.0f} MB a step"
        if not self.bytes_per_second:
            return text
        return (
            f"{text}; memory reads {self.bytes_per_second / 1e9:.1f} GB/s: "
            f"at most {self.tokens_per_second:.0f} tokens/s for one stream"
        )


def measure(backend: Backend, group: Group) -> Roofline:
    """Read the packed weights on all ranks at the same time, some times over: the best of it. Every rank calls it."""
    rates = [backend.read_rate(lambda: group.sum(torch.zeros(1))) for _ in range(PASSES)]
    mine = torch.tensor([backend.packed.total(), max(rates)], dtype=torch.float32)
    step_bytes, rate = group.sum(mine).tolist()
    return Roofline(tuple(name for name, _ in backend.packed.most_common()), step_bytes, rate)
