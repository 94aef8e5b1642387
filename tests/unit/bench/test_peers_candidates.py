"""How peers are started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.peers import candidates, environments
from bench.peers.candidates import PEERS
from bench.peers.environments import Environment, Unavailable


class NoModels:
    """Stands for forms that have been made."""

    source = Path("/source")

    def openvino(self, form: str) -> Path:
        return Path("/openvino") / form


def prepare(name: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[str, ...]:
    """The command of a peer on a CPU with these flags."""
    monkeypatch.setattr(candidates, "cpu_flags", lambda cpuinfo: frozenset(flags))
    monkeypatch.setattr(environments, "ensure", lambda name: Environment(Path("/environment")))
    models: Any = NoModels()
    [peer] = [peer for peer in PEERS if peer.name == name]
    return tuple(peer.prepare(models).argv)


def test_openvino_computes_in_float32_only_if_told(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = prepare("OpenVINO GenAI fp32", monkeypatch)
    free = prepare("OpenVINO GenAI bf16", monkeypatch, "avx512_bf16")
    assert exact == (*free, "--precision", "f32")
    assert "/openvino/fp32" in free
    assert "--precision" in prepare("OpenVINO GenAI int8", monkeypatch)
    assert [peer.name for peer in PEERS if peer.exact and peer.peer == "openvino"] == ["OpenVINO GenAI fp32"]


def test_a_cpu_without_bfloat16_has_no_candidate_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare("OpenVINO GenAI bf16", monkeypatch, "fpu", "amx_bf16")
    with pytest.raises(Unavailable, match="bfloat16"):
        prepare("OpenVINO GenAI bf16", monkeypatch, "fpu", "avx2")
