"""From streams to figures: what one load gave, as plain data for JSON, and the table of several. See docs/bench.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from headrace_launcher.bench.events import Answer
from headrace_launcher.bench.load import Job, Load, Outcome, Sent
from headrace_launcher.bench.stats import percentile
from headrace_launcher.bench.workloads import WORKLOADS

PERCENTS = (50, 90, 95, 99)
MEASURES = ("ttft", "tpot", "e2e")  # of a request; ITL is of an event
MOST_GAPS = 5000  # kept for plots
Point = dict[str, Any]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and the largest of values, rounded for reading; None without values."""
    if not values:
        return None
    made = {"mean": sum(values) / len(values), **{f"p{n}": percentile(values, n) for n in PERCENTS}, "max": max(values)}
    return {name: round(value, 3) for name, value in made.items()}


def measure(job: Job, sent: Sent, answer: Answer, began: float) -> dict[str, Any]:
    """One request's row: `at` in seconds after the start of the load, durations in milliseconds.

    TTFT is to the first text that is not empty; E2E to the end of the stream; TPOT is (E2E - TTFT) / (tokens - 1), None
    with less than two tokens.
    """
    row: dict[str, Any] = {
        "workload": job.workload, "tenant": job.tenant, "at": round(sent.began - began, 4), "error": answer.error,
    }
    if answer.error is not None:
        return row
    e2e = (sent.ended - sent.began) * 1e3
    ttft = None if answer.first is None else (answer.first - sent.began) * 1e3
    tpot = None if ttft is None or answer.tokens < 2 else (e2e - ttft) / (answer.tokens - 1)
    times = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
    return {
        **row, **{name: None if value is None else round(value, 3) for name, value in times.items()},
        "prompt_tokens": answer.prompt_tokens, "tokens": answer.tokens, "events": len(answer.times),
        "short": answer.tokens < job.output_len,
    }


def is_good(row: dict[str, Any], targets: dict[str, float]) -> bool:
    """Whether a request ended well and kept every target; the workload's own ones stand where none are given. A measure
    that the request does not have (a TPOT of one token) is kept.
    """
    kind = WORKLOADS.get(row["workload"])
    wanted = targets or (kind.targets if kind else {})
    return row["error"] is None and all(row[name] is None or row[name] <= most for name, most in wanted.items())


def point(load: Load, jobs: Sequence[Job], outcome: Outcome, label: str, targets: dict[str, float]) -> Point:
    """What one load gave. Durations in milliseconds, rates per second."""
    rows = [measure(*one, outcome.began) for one in zip(jobs, outcome.sent, outcome.answers, strict=True)]
    good = sum(is_good(row, targets) for row in rows)
    well = [row for row in rows if row["error"] is None]
    gaps = [
        (round(later - outcome.began, 4), round((later - earlier) * 1e3, 3))
        for answer in outcome.answers if answer.error is None
        for earlier, later in zip(answer.times, answer.times[1:], strict=False)
    ]
    gaps.sort()
    tokens, events = sum(row["tokens"] for row in well), sum(row["events"] for row in well)
    prompts = [row["prompt_tokens"] for row in well if row["prompt_tokens"] is not None]
    wall = outcome.wall
    return {
        "label": label, "requests": len(rows), "ok": len(well), "errors": outcome.errors(),
        "short_answers": sum(row["short"] for row in well), "wall_s": round(wall, 3),
        "prompt_tokens": sum(prompts) if prompts else None, "output_tokens": tokens,
        "tokens_counted_by": "usage" if well and all(a.completion_tokens is not None for a in outcome.answers if not a.error)
        else "events",
        "tokens_per_event": round(tokens / events, 3) if events else None,
        "requests_per_s": round(len(well) / wall, 3), "output_tokens_per_s": round(tokens / wall, 2),
        "good": good, "goodput_per_s": round(good / wall, 3),
        **{f"{name}_ms": spread([row[name] for row in well if row[name] is not None]) for name in MEASURES},
        "itl_ms": spread([gap for _, gap in gaps]),
        "by_workload": {name: _part(rows, "workload", name, targets) for name in _values(jobs, "workload") if name},
        "by_tenant": {name: _part(rows, "tenant", name, targets) for name in _values(jobs, "tenant")},
        "client_cpu_share": round(outcome.cpu / wall, 3), "rows": rows, "gaps": gaps[:: len(gaps) // MOST_GAPS + 1],
    }


def _values(jobs: Sequence[Job], key: str) -> list[Any]:
    return list(dict.fromkeys(getattr(job, key) for job in jobs))


def _part(rows: Sequence[dict[str, Any]], key: str, value: Any, targets: dict[str, float]) -> dict[str, Any]:
    mine = [row for row in rows if row[key] == value]
    return {
        "requests": len(mine), "ok": sum(row["error"] is None for row in mine),
        "good": sum(is_good(row, targets) for row in mine),
        **{f"{m}_ms": spread([row[m] for row in mine if row.get(m) is not None]) for m in MEASURES},
    }


COLUMNS = (
    ("load", lambda p: p["label"]), ("ok", lambda p: f"{p['ok']}/{p['requests']}"),
    ("req/s", lambda p: _short(p["requests_per_s"])), ("good/s", lambda p: _short(p["goodput_per_s"])),
    ("tokens/s", lambda p: _short(p["output_tokens_per_s"])), ("TTFT p50", lambda p: _of(p, "ttft", "p50")),
    ("p99", lambda p: _of(p, "ttft", "p99")), ("ITL p50", lambda p: _of(p, "itl", "p50")),
    ("p99", lambda p: _of(p, "itl", "p99")), ("TPOT p50", lambda p: _of(p, "tpot", "p50")),
    ("E2E p50", lambda p: _of(p, "e2e", "p50")), ("p99", lambda p: _of(p, "e2e", "p99")),
)


def table(points: Sequence[Point]) -> Table:
    """One line a load, and under each the workloads where there are several; durations in milliseconds."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for name, _ in COLUMNS:
        made.add_column(name, justify="left" if name == "load" else "right")
    for one in points:
        made.add_row(*(cell(one) for _, cell in COLUMNS))
        for name, part in one["by_workload"].items() if len(one["by_workload"]) > 1 else ():
            short = {f"{m}_ms": part[f"{m}_ms"] for m in MEASURES}
            shown = {"TTFT p50": _of(short, "ttft", "p50"), "TPOT p50": _of(short, "tpot", "p50")}
            shown |= {"E2E p50": _of(short, "e2e", "p50"), "ok": f"{part['good']}/{part['requests']} good", "load": f"  {name}"}
            made.add_row(*(shown.get(column, "") if column != "p99" else "" for column, _ in COLUMNS))
    return made


def _of(part: Point, measure: str, name: str) -> str:
    found = part[f"{measure}_ms"]
    return "-" if found is None else _short(found[name])


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
