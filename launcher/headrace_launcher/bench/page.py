"""The pictures of a result, and the page that holds them: SVG and HTML that load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from headrace_launcher.bench.charts import Series, cdf, chart
from headrace_launcher.bench.report import COLUMNS, Point

_STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2em;color:#212529}table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #dee2e6}td:first-child,th:first-child{text-align:left}"
    "figure{display:inline-block;margin:.5em}"
)


def pictures(points: Sequence[Point]) -> dict[str, str]:
    """SVG by name: latency over throughput, ITL over time, and the distributions of TTFT, ITL, TPOT and E2E."""
    curve = [
        Series(f"{measure.upper()} {name}", sorted(
            (p["output_tokens_per_s"], p[f"{measure}_ms"][name]) for p in points if p[f"{measure}_ms"]
        ))
        for measure in ("ttft", "itl") for name in ("p50", "p99")
    ]
    made = {
        "latency_throughput": chart("Latency over throughput", "output tokens/s", "ms", curve),
        "itl_over_time": chart("ITL over time", "seconds", "ms", [Series(p["label"], p["gaps"], dots=True) for p in points]),
    }
    for measure in ("ttft", "itl", "tpot", "e2e"):
        series = [Series(p["label"], cdf(_values(p, measure))) for p in points]
        made[f"cdf_{measure}"] = chart(f"Distribution of {measure.upper()}", "ms", "% of all", series)
    return made


def _values(point: Point, measure: str) -> list[float]:
    if measure == "itl":
        return [gap for _, gap in point["gaps"]]
    return [row[measure] for row in point["rows"] if row.get(measure) is not None]


def html(result: dict[str, Any]) -> str:
    """One page with the table and all pictures."""
    points = result["points"]
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell(p))}</td>" for _, cell in COLUMNS) + "</tr>" for p in points)
    setup = ", ".join(f"{name}: {value}" for name, value in result["setup"].items() if value not in (None, [], {}))
    figures = "".join(f"<figure>{svg}</figure>" for svg in pictures(points).values())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>headrace bench</title>'
        f"<style>{_STYLE}</style><h1>headrace bench</h1><p>{escape(setup)}</p>"
        f"<table><tr>{head}</tr>{body}</table><p>Durations in milliseconds.</p>{figures}</html>\n"
    )
