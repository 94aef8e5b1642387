"""Two results side by side."""

from __future__ import annotations

from typing import Any

from rich.table import Table

FIGURES = (  # name, path, whether more is better
    ("requests/s", ("requests_per_s",), True), ("goodput/s", ("goodput_per_s",), True),
    ("tokens/s", ("output_tokens_per_s",), True), ("TTFT p50", ("ttft_ms", "p50"), False),
    ("TTFT p99", ("ttft_ms", "p99"), False), ("ITL p50", ("itl_ms", "p50"), False), ("ITL p99", ("itl_ms", "p99"), False),
    ("TPOT p50", ("tpot_ms", "p50"), False), ("E2E p50", ("e2e_ms", "p50"), False), ("E2E p99", ("e2e_ms", "p99"), False),
)


def rows(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, str, float, float, float]]:
    """(load, figure, first, second, gain) of every load that both results have; a gain over 1: the second is better.

    Raises:
        ValueError: they have no load in common.
    """
    others = {point["label"]: point for point in second["points"]}
    found = []
    for point in first["points"]:
        if (other := others.get(point["label"])) is None:
            continue
        for name, path, more in FIGURES:
            a, b = _look(point, path), _look(other, path)
            if a and b:
                found.append((point["label"], name, a, b, b / a if more else a / b))
    if not found:
        raise ValueError("the two results have no load in common")
    return found


def _look(point: dict[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = point
    for name in path:
        value = value[name] if value is not None else None
    return None if value is None else float(value)


def table(first: dict[str, Any], second: dict[str, Any], names: tuple[str, str]) -> Table:
    """The rows for reading; raises what `rows` raises."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("load", "figure", *names, "gain"):
        made.add_column(column, justify="left" if column in ("load", "figure") else "right")
    for load, name, a, b, gain in rows(first, second):
        made.add_row(load, name, f"{a:.4g}", f"{b:.4g}", f"{gain:.2f}x")
    return made
