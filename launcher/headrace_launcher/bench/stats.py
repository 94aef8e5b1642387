"""Order statistics of measured values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of the values lie, interpolated between neighbours.

    Raises:
        ValueError: there are no values, or `percent` is outside [0, 100].
    """
    if not values:
        raise ValueError("no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"{percent} is no percentage")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return float(statistics.median(values))


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99, rounded for reading; None without values."""
    if not values:
        return None
    return {f"p{percent}": round(percentile(values, percent), 3) for percent in (50, 90, 99)}
