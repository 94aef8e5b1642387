"""What is compared with what."""

from __future__ import annotations

import pytest

from bench.peers.candidates import PEERS
from bench.peers.rows import (
    BUSY,
    DECODE,
    FLOAT32,
    GROUPS,
    HEADRACE,
    OUTPUT,
    OUTPUT_8,
    PREFILL,
    SHARDS,
    Measured,
    needed,
    ratio_figures,
    roofline_figures,
)
from bench.peers.workloads import EIGHT, MANY, ONE, Rates

SAME, OTHER, FLOAT = "llama.cpp Q4_1", "llama.cpp Q8_0", "OpenVINO GenAI fp32"


def one(decode: float) -> Rates:
    return Rates(decode / 2, decode, None)


def measured(**rates: list[Rates | None]) -> Measured:
    names = {"ours": HEADRACE, "same": SAME, "other": OTHER, "float": FLOAT}
    found = Measured()
    for name, rounds in rates.items():
        for value in rounds:
            found.add(names[name], ONE, value)
    return found


def test_ratios_are_of_the_same_round_and_against_the_best_median() -> None:
    found = measured(
        ours=[one(200), one(100), one(300)], same=[one(100), one(25), one(100)], other=[one(80), one(90), one(80)]
    )
    figures = {figure.name: figure for figure in ratio_figures(found, ["one-stream"], PEERS)}
    same = figures["1 stream, decode / llama.cpp, same file"]
    assert (same.measured, same.samples, same.at_least) == (3.0, (2.0, 4.0, 3.0), 2.0)
    assert figures["1 stream, decode / llama.cpp, best format (llama.cpp Q4_1)"].at_least == 1.8
    assert figures["1 stream / best peer (llama.cpp Q4_1)"].met


def test_rounds_that_do_not_count_have_no_ratio() -> None:
    found = measured(ours=[one(200), None, one(300)], same=[one(100), one(50), None])
    [same, *_] = ratio_figures(found, ["one-stream"], PEERS)
    assert same.samples == (2.0,)
    assert found.median(HEADRACE, DECODE) == 250


def test_without_the_other_side_there_is_no_figure() -> None:
    assert ratio_figures(measured(ours=[one(200)]), GROUPS, PEERS) == []
    assert ratio_figures(measured(ours=[one(200)], same=[None]), GROUPS, PEERS) == []


def test_exact_mode_is_compared_with_float32_alone() -> None:
    found = measured(same=[one(100)], float=[one(40)])
    found.add(FLOAT32, ONE, one(60))
    [figure] = ratio_figures(found, ["exact"], PEERS)
    assert (figure.name, figure.measured) == ("float32: 1 stream, decode / best float32 peer (OpenVINO GenAI fp32)", 1.5)


def test_headrace_beside_itself() -> None:
    found = measured(ours=[one(100)])
    found.add(SHARDS, ONE, one(95))
    found.add(BUSY, ONE, one(30))
    shards, busy = ratio_figures(found, ["shards", "busy"], PEERS)
    assert (shards.name, shards.measured, shards.met) == ("2 shards: 1 stream, decode / one process", 0.95, True)
    assert (busy.name, busy.measured, busy.met) == ("one core busy: 1 stream, decode / quiet", 0.3, False)


def test_roofline() -> None:
    found = measured(ours=[one(75), one(150)])
    found.add(HEADRACE, EIGHT, Rates(400, 60, None))
    found.bandwidth = [10e9, 20e9]
    figures = {f.name: f for f in roofline_figures(found, {HEADRACE: 100e6}, [DECODE, OUTPUT_8, PREFILL])}
    decode = figures["1 stream, decode / reading the weights"]
    assert (decode.samples, decode.at_least) == ((0.75, 0.75), 0.7)
    assert figures["8 streams / reading the weights"].samples == (0.5,)
    assert len(figures) == 2
    assert roofline_figures(found, {FLOAT32: 1.0}, [OUTPUT]) == []


def test_what_a_choice_of_rows_needs() -> None:
    peers = [peer for peer in PEERS if peer.peer in ("llama.cpp", "openvino")]
    assert needed(["shards"], peers) == {ONE: [HEADRACE, SHARDS], EIGHT: [HEADRACE, SHARDS]}
    exact = needed(["exact"], peers)
    assert set(exact) == {ONE, EIGHT, MANY}
    assert exact[ONE] == [FLOAT32, "llama.cpp F32", FLOAT]
    everything = needed(GROUPS, PEERS)
    assert len(everything) == 5
    assert everything[ONE][:4] == [HEADRACE, FLOAT32, SHARDS, BUSY]
    assert len(everything[ONE]) == 4 + len(PEERS)


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_needs_headrace(group: str) -> None:
    assert all(names[0].startswith(HEADRACE) for names in needed([group], []).values())
