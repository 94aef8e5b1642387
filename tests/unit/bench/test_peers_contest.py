"""A whole run of small servers that count: who takes part, what counts, and that nothing is left running."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.peers import contest
from bench.peers.candidates import Candidate
from bench.peers.contest import Contest, Contestant
from bench.peers.environments import Unavailable
from bench.peers.models import Models
from bench.peers.report import rates
from bench.peers.rows import HEADRACE, needed
from bench.peers.servers import Start
from bench.peers.workloads import ONE
from tests.models import write_tiny_model

COUNTING = """
import pathlib, sys
from bench.peers.serving.completions import StaticBatches, serve
def generate(prompts, tokens, emit):
    for step in range(tokens - {short} * (tokens > 16)):
        for index in range(len(prompts)):
            emit(index, 40 + step)
serve(StaticBatches(generate), pathlib.Path({folder!r}), int(sys.argv[1]))
"""


@dataclass
class TinyModels:
    """Stands for the embedded model's forms."""

    source: Path


def counting(models: Models, avx2: bool, short: int = 0) -> Start:
    """A server whose answers of more than 16 tokens lack `short`."""
    return Start((sys.executable, "-c", COUNTING.format(folder=str(models.source), short=short), "{port}"))


def refuse(models: Models, avx2: bool) -> Start:
    raise Unavailable("no wheel for this machine")


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny: Any = TinyModels(write_tiny_model(tmp_path))

    def start_own(found: Contest, stack: contextlib.ExitStack, name: str, avx2: bool) -> Contestant:
        return contest._start_peer(found, stack, Candidate(name, "", "", counting), counting(tiny, avx2))

    monkeypatch.setattr("bench.peers.contest.Models", lambda: tiny)
    monkeypatch.setattr("bench.peers.contest._start_own", start_own)
    monkeypatch.setattr("bench.peers.roofline.measure", lambda folder: (10e9, {None: 1e8, "float32": 4e8}))
    peers = [
        Candidate("llama.cpp Q4_1", "llama.cpp", "q4_1", counting),
        Candidate("short", "llama.cpp", "q4_0", lambda models, avx2: counting(models, avx2, short=1)),
        Candidate("missing", "vllm", "float32", refuse),
        Candidate("broken", "openvino", "int8", lambda *_: Start((sys.executable, "-c", "raise SystemExit('an error')"))),
    ]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    found = Contest()
    contest.run(found, ["one-stream"], peers, 2, quick=True)
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
    assert found.unavailable["missing"] == "no wheel for this machine"
    assert "an error" in found.unavailable["broken"]
    assert found.invalid == ["short, 1 stream: an answer has 31 tokens instead of 32"] * 2
    assert found.measured.rates["short", ONE] == [None, None]
    assert [len(found.measured.rates[name, ONE]) for name in (HEADRACE, "llama.cpp Q4_1")] == [2, 2]
    assert found.servers[HEADRACE]["answer"] == found.servers["llama.cpp Q4_1"]["answer"] != ""
    assert found.servers["llama.cpp Q4_1"]["memory_mb"] > 0
    assert (found.measured.bandwidth, found.step_bytes) == ([10e9, 10e9], {HEADRACE: 1e8})
    assert list(rates(found, peers)) == [HEADRACE, "llama.cpp Q4_1"]
    assert needed(["one-stream"], peers) == {ONE: [HEADRACE, *(peer.name for peer in peers)]}


def test_another_process_is_busy_only_meanwhile() -> None:
    before = len(psutil.Process().children())
    with contest.busy_process():
        assert len(psutil.Process().children()) == before + 1
    assert len(psutil.Process().children()) == before


def test_a_measurement_waits_for_what_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([50.0, 9.0, 0.5])
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: next(shares))
    contest.wait_until_quiet()
    assert list(shares) == []
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 90.0)
    monkeypatch.setattr(contest, "QUIET_SECONDS", 0.0)
    contest.wait_until_quiet()  # not for ever
