"""Measured figures beside their targets: the table that is printed and the records in bench/results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine import facts

RESULTS = Path(__file__).parent / "results"
_HEAD = ("figure", "unit", "target", "measured", "ratio", "recorded", "")


@dataclass(frozen=True)
class Figure:
    """One measured number. Without a target it is information."""

    name: str
    unit: str
    measured: float
    at_least: float | None = None
    below: float | None = None
    samples: tuple[float, ...] = ()  # what `measured` is the median of

    @property
    def ratio(self) -> float | None:
        """How well the target is met: 1 = just so, more is better; None without one."""
        if self.at_least is not None:
            return self.measured / self.at_least
        if self.below is not None:
            return self.below / self.measured if self.measured else float("inf")
        return None

    @property
    def met(self) -> bool:
        """The target is met, or there is none."""
        if self.at_least is not None:
            return self.measured >= self.at_least
        return self.below is None or self.measured < self.below

    def to_json(self) -> dict[str, Any]:
        """Everything, with the target as text."""
        ratio = self.ratio
        return {
            "name": self.name, "unit": self.unit, "target": target_text(self), "measured": short(self.measured),
            "ratio": None if ratio is None else round(ratio, 2), "met": None if ratio is None else self.met,
            "samples": [short(value) for value in self.samples],
        }


@dataclass
class Result:
    """What one benchmark found, and how the machine was at its start."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    setup: dict[str, Any] = field(default_factory=dict)  # lengths, repeats, threads: what one must know to repeat it
    details: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=facts)

    def to_json(self) -> dict[str, Any]:
        """The record."""
        return {
            "name": self.name, "machine": self.machine, "setup": self.setup,
            "figures": [figure.to_json() for figure in self.figures], "details": self.details,
        }

    def write(self, folder: Path = RESULTS) -> Path:
        """Write folder/NAME.json."""
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", "utf-8")
        return path


def recorded(name: str, folder: Path = RESULTS) -> dict[str, float]:
    """Measured values of the record of that name, by figure; {} if there is none."""
    path = folder / f"{name}.json"
    if not path.exists():
        return {}
    rows = json.loads(path.read_text("utf-8"))["figures"]
    return {row["name"]: row["measured"] for row in rows}


def short(value: float) -> float:
    """Four significant digits at least, no digits of noise."""
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")


def target_text(figure: Figure) -> str | None:
    """The target as it is read."""
    if figure.at_least is not None:
        return f">= {figure.at_least:g}"
    return None if figure.below is None else f"< {figure.below:g}"


def table(figures: Sequence[Figure], before: dict[str, float]) -> str:
    """One line a figure. `before`: recorded values by name."""
    rows = [_HEAD]
    for figure in figures:
        ratio = figure.ratio
        rows.append((
            figure.name, figure.unit, target_text(figure) or "-", f"{short(figure.measured):g}",
            "-" if ratio is None else f"{ratio:.2f}",
            f"{before[figure.name]:g}" if figure.name in before else "-",
            "" if figure.met else "MISSED",
        ))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
        cells += [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
