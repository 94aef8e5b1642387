"""Line charts as SVG, without anything from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 46
COLORS = ("#0b7285", "#d9480f", "#5f3dc4", "#2b8a3e", "#c2255c", "#495057", "#e67700", "#1864ab")


@dataclass(frozen=True)
class Series:
    """Points (x, y) in order; `dots`: not joined."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values from `low` to `high`, with at most about so many steps between them."""
    span = (high - low) or abs(high) or 1.0
    step: float = 10 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """An SVG element. Both axes begin at 0; a chart without points says so."""
    points = [point for one in series for point in one.points]
    right = max((x for x, _ in points), default=0) or 1.0
    top = (max((y for _, y in points), default=0) or 1.0) * 1.05
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / right * width, TOP + height - y / top * height

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="#343a40">',
        f"<title>{escape(title)}</title>", f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13" font-weight="600">{escape(title)}</text>',
        f'<text x="{LEFT + width / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(14 {TOP + height / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for value in ticks(0, right):
        x, y = place(value, 0)
        out.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{value:g}</text>')
    for value in ticks(0, top):
        x, y = place(0, value)
        out.append(f'<path d="M{x:.1f} {y:.1f}H{LEFT + width}" stroke="#dee2e6"/>')
        out.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    if not points:
        out.append(f'<text x="{LEFT + width / 2}" y="{TOP + height / 2}" text-anchor="middle">no data</text>')
    for number, one in enumerate(series):
        out += _drawn(one, COLORS[number % len(COLORS)], [place(x, y) for x, y in one.points])
        if len(series) > 1:
            y = TOP + 12 + 14 * number
            color = COLORS[number % len(COLORS)]
            out.append(f'<rect x="{LEFT + width - 150}" y="{y - 8}" width="9" height="9" fill="{color}"/>')
            out.append(f'<text x="{LEFT + width - 136}" y="{y}">{escape(one.name)}</text>')
    return "\n".join([*out, "</svg>"])


def _drawn(one: Series, color: str, places: list[tuple[float, float]]) -> list[str]:
    marks = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{1.5 if one.dots else 3}" fill="{color}"/>' for x, y in places]
    if one.dots:
        return marks
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = [f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.8"/>'] if places else []
    return drawn + (marks if len(places) <= 20 else [])


def cdf(values: Sequence[float], most: int = 200) -> list[tuple[float, float]]:
    """(value, percent of the values that are not larger), at most about so many points."""
    ordered = sorted(values)
    step = len(ordered) // most + 1
    places = sorted({*range(0, len(ordered), step), len(ordered) - 1}) if ordered else []
    return [(ordered[i], (i + 1) / len(ordered) * 100) for i in places]
