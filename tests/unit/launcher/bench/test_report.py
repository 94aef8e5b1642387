"""Figures of a load from what came and when, the comparison of two results, and the pictures."""

from __future__ import annotations

import json
import math
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from headrace_launcher.bench import compare, page, report
from headrace_launcher.bench.charts import Series, cdf, chart, ticks
from headrace_launcher.bench.events import read_answer
from headrace_launcher.bench.load import Job, Load, Outcome, Sent
from headrace_launcher.bench.workloads import WORKLOADS


def chunk(at: float, text: str) -> tuple[float, bytes]:
    return at, b'data: {"choices": [{"delta": {"content": ' + json.dumps(text).encode() + b"}}]}\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}\n\n'
STREAM = [chunk(10.1, ""), chunk(10.5, "a"), chunk(10.75, "b c"), chunk(11.0, "d"), (11.5, USAGE)]


def result(**changes: Any) -> dict[str, Any]:
    sent = [Sent(10.0, 11.5, STREAM), Sent(12.0, 12.5, error="status 429")]
    jobs = [Job("x", 5, "chat"), Job("y", 5, "document")]
    answers = [read_answer("chat", STREAM), read_answer("chat", [])]
    outcome = Outcome(4.0, sent, answers, began=9.0, cpu=1.0)
    return {"setup": {"url": "<u>"}, "points": [{**report.point(Load("u", "chat"), jobs, outcome, "1 at once", {}), **changes}]}


def test_definitions() -> None:
    (found,) = result()["points"]
    assert (found["ok"], found["requests"], found["errors"]) == (1, 2, {"no output": 1})
    assert found["ttft_ms"]["p50"] == 500  # the empty event before does not count
    assert found["e2e_ms"]["p50"] == 1500
    assert found["tpot_ms"]["p50"] == 250  # (1500 - 500) / (5 - 1), although there were three events
    assert found["itl_ms"]["p50"] == 250
    assert (found["output_tokens"], found["tokens_counted_by"], found["prompt_tokens"]) == (5, "usage", 7)
    assert found["tokens_per_event"] == pytest.approx(5 / 3, abs=1e-3)
    assert (found["output_tokens_per_s"], found["client_cpu_share"]) == (1.25, 0.25)
    assert [row["at"] for row in found["rows"]] == [1.0, 3.0]
    assert found["gaps"] == [(1.75, 250.0), (2.0, 250.0)]


@pytest.mark.parametrize(("targets", "good"), [
    ({"ttft": 500}, True), ({"ttft": 499}, False), ({"e2e": 1500, "tpot": 250}, True), ({"tpot": 249}, False), ({}, False),
])
def test_goodput(targets: dict[str, float], good: bool) -> None:
    row = result()["points"][0]["rows"][0]
    assert report.is_good(row, targets) == good
    assert WORKLOADS["chat"].targets["tpot"] == 100  # which 250 misses
    assert not report.is_good({**row, "error": "x"}, targets)
    assert report.is_good({**row, "tpot": None}, {"tpot": 1})


def test_table_and_page_show_every_load() -> None:
    made = result()
    console = Console(width=160)
    with console.capture() as capture:
        console.print(report.table(made["points"]))
    text = capture.get()
    assert "1 at once" in text
    assert "document" in text
    assert "0/1 good" in text
    shown = page.html(made)
    assert shown.count("<svg") == len(page.pictures(made["points"])) == 6
    assert "&lt;u&gt;" in shown
    assert all(word not in shown.replace("http://www.w3.org/2000/svg", "") for word in ("http:", "https:", "<script", "src="))


def test_comparison() -> None:
    first, second = result(), result(output_tokens_per_s=2.5, ttft_ms={"p50": 250.0, "p99": 1000.0})
    found = {name: (a, b, gain) for _, name, a, b, gain in compare.rows(first, second)}
    assert found["tokens/s"] == (1.25, 2.5, 2.0)
    assert found["TTFT p50"] == (500.0, 250.0, 2.0)
    assert found["TTFT p99"] == (500.0, 1000.0, 0.5)
    assert compare.table(first, second, ("a", "b")).row_count == len(found)
    with pytest.raises(ValueError, match="no load in common"):
        compare.rows(first, result(label="other"))


def test_charts_are_xml_whatever_they_hold() -> None:
    for series in ([], [Series("a<b", [(0.0, 0.0)])], [Series("a", [(1, 2), (3, 4)]), Series("b", [(1, 9)], dots=True)]):
        root = ElementTree.fromstring(chart("<t>", "x", "y", series))
        assert root.tag.endswith("svg")
    joined = chart("t", "x", "y", [Series("a", [(1, 2), (3, 4)])])
    assert joined.count("<polyline") == 1
    assert "no data" in chart("t", "x", "y", [])


@pytest.mark.parametrize("top", [0.004, 1, 7.3, 99, 12345])
def test_ticks(top: float) -> None:
    found = ticks(0, top)
    assert found[0] == 0
    assert 3 <= len(found) <= 8
    assert found[-1] <= top * 1.001
    assert math.isclose(found[1] * (len(found) - 1), found[-1])


def test_cdf() -> None:
    assert cdf([3, 1, 2, 4]) == [(1, 25), (2, 50), (3, 75), (4, 100)]
    assert cdf([]) == []
    many = cdf(range(10_000))
    assert len(many) <= 202
    assert many[-1] == (9999, 100)
