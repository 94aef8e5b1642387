"""`headrace bench` against a router before a scripted shard: every API, closed and open loop, traces, files, failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace._common import options
from headrace_launcher import cli
from tests.fakes.routers import running
from tests.fakes.scripted_shard import ScriptedShard
from tests.fakes.text_models import write_text_model


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    write_text_model(tmp_path)
    async with running(tmp_path, ScriptedShard(max_total_tokens=4096), max_best_of=2) as server:
        yield server.url


async def bench(*argv: str) -> int:
    """The command, in a thread: it has an event loop of its own."""
    return await asyncio.to_thread(options.run, cli.headrace, ["bench", *argv])


@pytest.mark.parametrize("api", ["openai", "completions", "tgi"])
async def test_every_api_counts_tokens_exactly(url: str, api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    argv = ("--url", url, "--api", api, "--requests", "6", "--concurrency", "1", "--concurrency", "3", "--output", str(out))
    assert await bench(*argv, "--input-len", "20", "--output-len", "9") == 0
    result = json.loads(out.read_text("utf-8"))
    assert [point["label"] for point in result["points"]] == ["1 at once", "3 at once"]
    for point in result["points"]:
        assert (point["ok"], point["output_tokens"], point["tokens_counted_by"]) == (6, 54, "usage")
        assert point["short_answers"] == 0
        assert point["prompt_tokens"] > 60
        assert all(row["ttft"] <= row["e2e"] for row in point["rows"])
    assert "3 at once" in capsys.readouterr().out
    assert await bench("--compare", str(out), str(out)) == 0
    assert "1.00x" in capsys.readouterr().out


async def test_open_loop_with_all_workloads_and_pictures(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html, svg = tmp_path / "out.json", tmp_path / "out.html", tmp_path / "svg"
    mix = ("--workload", "chat", "--workload", "agent", "--workload", "document")
    files = ("--output", str(out), "--html", str(html), "--svg", str(svg))
    assert await bench("--url", url, *mix, "--rate", "40", "--requests", "24", "--scale", "0.1", *files) == 0
    (point,) = json.loads(out.read_text("utf-8"))["points"]
    assert point["label"] == "40 req/s"
    assert set(point["by_workload"]) == {"chat", "agent", "document"}
    starts = [row["at"] for row in point["rows"]]
    assert 0.1 < max(starts) < 3
    assert {path.stem for path in svg.iterdir()} >= {"latency_throughput", "itl_over_time", "cdf_ttft"}
    assert "<svg" in html.read_text("utf-8")
    assert "good" in capsys.readouterr().out


async def test_a_trace(url: str, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace", tmp_path / "out.json"
    rows = [{"at": 0.05 * n, "prompt": f"no {n}", "output_tokens": n + 2, "workload": "chat"} for n in range(4)]
    trace.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    assert await bench("--url", url, "--trace", str(trace), "--output", str(out)) == 0
    (point,) = json.loads(out.read_text("utf-8"))["points"]
    assert (point["label"], point["output_tokens"]) == ("trace", 2 + 3 + 4 + 5)


async def test_the_capacity_is_found_and_more_is_survived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text_model(tmp_path)
    out = tmp_path / "out.json"
    slow = ScriptedShard(step_seconds=0.005, max_batch_size=2)  # two requests in about 0.03 s
    async with running(tmp_path, slow, api_key="own") as server:
        argv = ("--url", server.url, "--api", "completions", "--api-key", "own", "--target", "ttft=1000", "--output", str(out))
        size = ("--workload", "chat", "--workload", "document", "--input-len", "8", "--output-len", "5", "--seconds", "0.4")
        assert await bench("--find-capacity", *argv, *size, "--rate", "40", "--deadline", "3") == 0
    result = json.loads(out.read_text("utf-8"))
    assert result["capacity"] > 0
    assert all(point["by_workload"] for point in result["points"])
    above = result["points"][-1]
    assert above["requests"] == max(round(3 * result["capacity"] * 0.4), 20)  # whether they were served or not
    assert set(above["by_workload"]) == {"chat", "document"}
    shown = capsys.readouterr().out
    assert "capacity:" in shown
    assert "at 3 times that" in shown
    assert await bench("--find-capacity", "--concurrency", "2") == 2


async def test_failures_are_counted_and_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--url", url, "--api", "tgi", "--requests", "2", "--warmup", "0", "--input-len", "5")
    assert await bench(*argv, "--output-len", "100000") == 1
    shown = capsys.readouterr().out
    assert "0/2" in shown
    assert "status 422" in shown
    assert await bench("--url", "http://127.0.0.1:1", "--requests", "1") == 1
    assert "the warm-up failed" in capsys.readouterr().err
    assert await bench("--rate", "1", "--concurrency", "1") == 2
    assert await bench("--target", "x=1") == 2
