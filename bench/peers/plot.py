"""The servers' rates as bars, one panel for each kind of work: `python plot.py RECORD SVG`, where matplotlib is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

OURS, THEIRS = "#0b7285", "#adb5bd"


def draw(record: dict[str, Any], target: Path) -> None:
    """Write the picture; the same record gives the same bytes."""
    plt.rcParams.update({"svg.hashsalt": "headrace", "font.size": 9})
    table: dict[str, dict[str, Any]] = record["details"]["tokens_per_s"]
    titles = list(dict.fromkeys(title for row in table.values() for title in row))
    columns = min(3, len(titles))
    lines = -(-len(titles) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 3.2 * lines), squeeze=False)
    for axis in axes.flat[len(titles) :]:
        axis.set_visible(False)
    for title, axis in zip(titles, axes.flat, strict=False):
        bars = sorted((row[title]["median"], server) for server, row in table.items() if title in row)
        names = [server for _, server in bars]
        colors = [OURS if name.startswith("Headrace") else THEIRS for name in names]
        drawn = axis.barh(names, [value for value, _ in bars], color=colors)
        axis.bar_label(drawn, fmt="%.0f", padding=2)
        axis.set_title(f"{title}, tokens/s")
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    machine, rounds = record["machine"], record["setup"]["rounds"]
    kept = ", AVX2 alone" if record["setup"].get("avx2") else ""
    figure.suptitle(f"{machine['cpu']}{kept}, {machine['cores']} cores: SmolLM2-135M-Instruct, medians of {rounds}")
    figure.tight_layout()
    figure.savefig(target, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text("utf-8")), Path(sys.argv[2]))
