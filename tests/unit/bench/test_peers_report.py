"""The record of a comparison and its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.peers import command
from bench.peers.candidates import PEERS
from bench.peers.contest import Contest, Stopped
from bench.peers.report import markdown, result
from bench.peers.rows import GROUPS, HEADRACE
from bench.peers.workloads import EIGHT, ONE, Rates


def found() -> Contest:
    contest = Contest(unavailable={"vLLM fp32": "no wheel"}, step_bytes={HEADRACE: 100e6})
    contest.measured.bandwidth = [20e9, 20e9, 20e9]
    for rate in (150.0, 160.0, 170.0):
        contest.measured.add(HEADRACE, ONE, Rates(rate - 30, rate, None))
        contest.measured.add("llama.cpp Q4_1", ONE, Rates(rate / 2 - 10, rate / 2, None))
        contest.measured.add("llama.cpp Q4_1", EIGHT, None)
    contest.servers = {
        HEADRACE: {"memory_mb": 400, "most_other_cpu": 0.02}, "llama.cpp Q4_1": {"note": "same file", "most_other_cpu": 0.5},
    }
    contest.invalid = ["llama.cpp Q4_1, 8 streams: status 500"]
    return contest


def test_the_record_has_every_round() -> None:
    record = result(found(), GROUPS, PEERS, 3, False).to_json()
    assert record["details"]["tokens_per_s"]["llama.cpp Q4_1"] == {
        "1 stream, decode": {"median": 80.0, "rounds": [75.0, 80.0, 85.0]},
        "1 stream": {"median": 70.0, "rounds": [65.0, 70.0, 75.0]},
    }
    assert record["details"]["read_bandwidth_gb_s"] == [20.0, 20.0, 20.0]
    names = {figure["name"]: figure["measured"] for figure in record["figures"]}
    assert names["1 stream, decode / llama.cpp, same file"] == 2.0
    assert names["1 stream, decode / reading the weights"] == 0.8
    assert json.loads(json.dumps(record)) == record


def test_tables() -> None:
    text = markdown(result(found(), GROUPS, PEERS, 3, False).to_json())
    assert "| tokens/s | 1 stream, decode | 1 stream | memory, MB |" in text
    assert "| Headrace | 160 | 130 | 400 |" in text
    assert "| llama.cpp Q4_1 | 80 | 70 | – |" in text
    assert "| 1 stream, decode / llama.cpp, same file | 2.00 | >= 2 |" in text
    assert "Not measured: vLLM fp32 (no wheel)." in text
    assert "Does not count: llama.cpp Q4_1, 8 streams: status 500." in text
    assert "Doubtful, since other processes used the CPU meanwhile (cores): llama.cpp Q4_1 (0.5)." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "llama"], "'llama' is none of llama.cpp, openvino"),
        (["--only", "speed"], "'speed' is none of one-stream"),
        (["--runs", "0"], "at least 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Stopped])
def test_a_run_that_is_stopped_prints_what_it_has(
    stop: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(contest: Contest, *_: object) -> None:
        vars(contest).update(vars(found()))
        contest.measured.add(HEADRACE, ONE, Rates(100, 200, None))
        raise stop

    monkeypatch.setattr("bench.peers.command.run", run)
    monkeypatch.setattr("bench.peers.command.RESULTS", tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    command.main([])
    out, err = capsys.readouterr()
    assert "stopped in round 3 of 5" in err
    assert "| llama.cpp Q4_1 | 80 | 70 | – |" in out
    assert list(tmp_path.iterdir()) == []
