"""Targets, ratios, the table and the records."""

from __future__ import annotations

import json
from pathlib import Path

from bench.figures import Figure, Result, recorded, short, table
from bench.machine import cpu_flags, cpu_model
from bench.startup import breakdown

MORE = Figure("rate", "tokens/s", 60_000.4, at_least=57_600)
LESS = Figure("start", "s", 10.0, below=8)
INFORMATION = Figure("cost", "us", 7.77777)


def test_a_ratio_is_one_where_the_target_is_just_met() -> None:
    assert MORE.ratio is not None
    assert LESS.ratio is not None
    assert round(MORE.ratio, 3) == 1.042
    assert LESS.ratio == 0.8
    assert INFORMATION.ratio is None
    assert (MORE.met, LESS.met, INFORMATION.met) == (True, False, True)
    assert Figure("idle", "%", 0.0, below=2).ratio == float("inf")


def test_short() -> None:
    assert [short(v) for v in (60_000.4, 7.77777, 0.000123456, 0)] == [60_000, 7.778, 0.0001235, 0]


def test_table() -> None:
    head, more, less, information = table([MORE, LESS, INFORMATION], {"start": 7.5}).splitlines()
    assert head.split() == ["figure", "unit", "target", "measured", "ratio", "recorded"]
    assert more.split() == ["rate", "tokens/s", ">=", "57600", "60000", "1.04", "-"]
    assert less.split() == ["start", "s", "<", "8", "10", "0.80", "7.5", "MISSED"]
    assert information.split() == ["cost", "us", "-", "7.778", "-", "-"]


def test_records(tmp_path: Path) -> None:
    assert recorded("x", tmp_path) == {}
    path = Result("x", [MORE, LESS], {"rounds": 3}).write(tmp_path)
    assert recorded("x", tmp_path) == {"rate": 60_000, "start": 10.0}
    record = json.loads(path.read_text())
    assert {"cores", "cpu", "torch", "date", "load_before"} <= set(record["machine"])
    assert record["figures"][1]["met"] is False


def test_cpu_model() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n") == "Some CPU @ 2 GHz"
    assert cpu_model("processor\t: 0\n")


def test_cpu_flags() -> None:
    assert cpu_flags("model name\t: Some CPU\nflags\t\t: fpu avx2\n\nflags\t\t: fpu avx2\n") == {"fpu", "avx2"}
    assert cpu_flags("Features\t: fp asimd\n") == {"fp", "asimd"}
    assert cpu_flags("processor\t: 0\n") == frozenset()


def test_breakdown() -> None:
    line = "M is served at http://127.0.0.1:1 (ready after 6.1 s: import 2.0 s, router 1.0 s)\n"
    assert breakdown("other\n" + line) == "6.1 s: import 2.0 s, router 1.0 s"
    assert breakdown("") == ""
