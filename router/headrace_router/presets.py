"""What a server is tuned for (`--workload`), where no setting says otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_router.settings import RouterSettings


@dataclass(frozen=True)
class Preset:
    """
    Attributes:
        max_step_tokens: prompt and decode tokens of a step; the shard's own limit holds as well.
        itl_target_ms: milliseconds that a step with running streams should take at most, by shorter chunks; 0: no matter.
        max_queue_size: requests that may wait for a place.
        max_queue_tokens: tokens that these may take together, prompts and outputs; one alone may wait whatever it takes.
    """

    max_step_tokens: int
    itl_target_ms: int
    max_queue_size: int
    max_queue_tokens: int

    def __str__(self) -> str:
        target = f"steps of {self.itl_target_ms} ms while streams run" if self.itl_target_ms else "steps of any length"
        queue = f"at most {self.max_queue_size} requests and {self.max_queue_tokens} tokens waiting"
        return f"at most {self.max_step_tokens} tokens a step, {target}, {queue}"


PRESETS = {
    "chat": Preset(max_step_tokens=2048, itl_target_ms=100, max_queue_size=256, max_queue_tokens=1 << 21),
    "agent": Preset(max_step_tokens=4096, itl_target_ms=250, max_queue_size=512, max_queue_tokens=1 << 23),
    "document": Preset(max_step_tokens=8192, itl_target_ms=0, max_queue_size=8192, max_queue_tokens=1 << 27),
}


def preset(settings: RouterSettings) -> Preset:
    """The workload's preset with the settings that are given in its place."""
    base = PRESETS[settings.workload]
    return Preset(
        settings.max_step_tokens or base.max_step_tokens,
        base.itl_target_ms if settings.itl_target_ms is None else settings.itl_target_ms,
        settings.max_queue_size or base.max_queue_size,
        settings.max_queue_tokens or base.max_queue_tokens,
    )
