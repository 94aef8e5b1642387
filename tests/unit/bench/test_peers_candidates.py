"""How peers are started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.peers import candidates, environments
from bench.peers.candidates import PEERS
from bench.peers.environments import Environment, Unavailable
from bench.peers.servers import Start


class NoModels:
    """Stands for forms that have been made."""

    source = Path("/source")

    def openvino(self, form: str) -> Path:
        return Path("/openvino") / form


def prepare(name: str, monkeypatch: pytest.MonkeyPatch, *flags: str, avx2: bool = False) -> Start:
    """How a peer is started on a CPU with these flags."""
    monkeypatch.setattr(candidates, "cpu_flags", lambda cpuinfo: frozenset(flags))
    monkeypatch.setattr(environments, "ensure", lambda name: Environment(Path("/environment")))
    models: Any = NoModels()
    [peer] = [peer for peer in PEERS if peer.name == name]
    return peer.prepare(models, avx2)


def test_openvino_computes_in_float32_only_if_told(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = prepare("OpenVINO GenAI fp32", monkeypatch).argv
    free = prepare("OpenVINO GenAI bf16", monkeypatch, "avx512_bf16").argv
    assert exact == (*free, "--precision", "f32")
    assert "/openvino/fp32" in free
    assert "--precision" in prepare("OpenVINO GenAI int8", monkeypatch).argv
    assert [peer.name for peer in PEERS if peer.exact and peer.peer == "openvino"] == ["OpenVINO GenAI fp32"]


def test_a_cpu_without_bfloat16_has_no_candidate_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare("OpenVINO GenAI bf16", monkeypatch, "fpu", "amx_bf16")
    with pytest.raises(Unavailable, match="bfloat16"):
        prepare("OpenVINO GenAI bf16", monkeypatch, "fpu", "avx2")


def test_all_can_be_kept_to_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare("OpenVINO GenAI fp32", monkeypatch).env == {}
    assert prepare("OpenVINO GenAI fp32", monkeypatch, avx2=True).env["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    for name in ("OpenVINO GenAI bf16", "vLLM fp32"):
        with pytest.raises(Unavailable, match="AVX"):
            prepare(name, monkeypatch, "amx_bf16", "avx512f", avx2=True)
