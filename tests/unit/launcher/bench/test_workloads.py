"""Generated workloads and traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_launcher.bench.command import parse_targets
from headrace_launcher.bench.workloads import WORKLOADS, draw_lengths, make_jobs, make_prompt, read_trace
from headrace_router.tenants import CLASSES


def test_there_is_one_for_each_class() -> None:
    assert tuple(WORKLOADS) == CLASSES


def test_lengths_are_the_seeds_and_within_bounds() -> None:
    drawn = draw_lengths(CLASSES, 300, seed=3)
    assert drawn == draw_lengths(CLASSES, 300, seed=3) != draw_lengths(CLASSES, 300, seed=4)
    for name, kind in WORKLOADS.items():
        mine = [lengths for lengths in drawn if lengths.workload == name]
        assert len(mine) > 60
        assert {lengths.group for lengths in mine} == set(range(kind.groups))
        for lengths in mine:
            assert kind.own[0] <= lengths.own <= kind.own[1]
            assert kind.output[0] <= lengths.output <= kind.output[1]
    assert max(lengths.own for lengths in draw_lengths(CLASSES, 300, seed=3, scale=0.1)) <= 400


def test_a_group_shares_its_beginning_and_nothing_else() -> None:
    drawn = draw_lengths(["agent"], 40, seed=1)
    prompts = [make_prompt(lengths, i) for i, lengths in enumerate(drawn)]
    assert len(set(prompts)) == 40
    heads = {lengths.group: prompts[i][:2000] for i, lengths in enumerate(drawn)}
    assert len(set(heads.values())) == 4
    assert all(prompts[i].startswith(heads[lengths.group]) for i, lengths in enumerate(drawn))
    assert make_jobs(drawn, 1) == make_jobs(drawn, 1) != make_jobs(drawn, 2)


def test_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('{"at": 0, "prompt": "hi", "output_tokens": 3}\n\n'
                    '{"at": 1.5, "input_tokens": 40, "output_tokens": 5, "workload": "agent"}\n', "utf-8")
    first, second = read_trace(path)
    assert (first.prompt, first.output_len, first.at, first.workload) == ("hi", 3, 0.0, "")
    assert (second.at, second.workload) == (1.5, "agent")


@pytest.mark.parametrize(("line", "words"), [
    ("{", "line 1"), ('{"at": 1}', "KeyError"),
    ('{"at": 0, "prompt": "x", "output_tokens": 1, "workload": "y"}', "none of chat"),
    ('{"at": 0, "prompt": "x", "output_tokens": 1, "tokens": 2}', "tokens is not known"), ("[]", "TypeError"),
])
def test_what_is_wrong_with_a_trace_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(line, "utf-8")
    with pytest.raises(ValueError, match=words):
        read_trace(path)


def test_targets() -> None:
    assert parse_targets(["ttft=500", "e2e=1.5"]) == {"ttft": 500, "e2e": 1.5}
    for wrong in ("ttft", "itl=3", "ttft=x", "ttft=-1"):
        with pytest.raises(ValueError, match="--target"):
            parse_targets([wrong])
