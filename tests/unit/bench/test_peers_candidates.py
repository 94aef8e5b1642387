"""How peers are started."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.machine import cpu_flags
from bench.peers import candidates, environments
from bench.peers.candidates import PEERS
from bench.peers.environments import Environment, Unavailable
from bench.peers.servers import Start


class NoModels:
    """Stands for forms that have been made."""

    source = Path("/source")

    def safetensors(self) -> Path:
        return Path("/safetensors")

    def openvino(self, form: str) -> Path:
        return Path("/openvino") / form


def prepare(name: str, monkeypatch: pytest.MonkeyPatch, *flags: str, avx2: bool = False) -> Start:
    """How a peer is started on a CPU with these flags."""
    monkeypatch.setattr(candidates, "cpu_flags", lambda cpuinfo: frozenset(flags))
    monkeypatch.setattr(environments, "ensure", lambda *_: Environment(Path("/environment")))
    models: Any = NoModels()
    [peer] = [peer for peer in PEERS if peer.name == name]
    return peer.start(models, avx2)


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
    monkeypatch.setattr(environments, "ensure_avx2_only", lambda: Path("/only.so"))
    assert prepare("OpenVINO GenAI fp32", monkeypatch).env == {}
    assert prepare("OpenVINO GenAI fp32", monkeypatch, avx2=True).env == {"LD_PRELOAD": "/only.so"}
    monkeypatch.setattr(candidates, "_TCMALLOC", Path(__file__))
    assert prepare("vLLM fp32", monkeypatch).env["LD_PRELOAD"] == __file__
    assert prepare("vLLM fp32", monkeypatch, avx2=True).env["LD_PRELOAD"] == f"/only.so:{__file__}"
    with pytest.raises(Unavailable, match="bfloat16"):
        prepare("OpenVINO GenAI bf16", monkeypatch, "amx_bf16", avx2=True)


@pytest.mark.skipif(
    "cpuid_fault" not in cpu_flags(Path("/proc/cpuinfo").read_text()) or shutil.which("cc") is None,
    reason="this CPU always answers CPUID itself, or there is no C compiler",
)
def test_a_process_sees_no_wider_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Threads and processes of its own neither; a fault of its own is still one."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    env = environments.own_environment({"LD_PRELOAD": str(environments.ensure_avx2_only())})
    ask = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    threads = f"import threading; t = threading.Thread(target=exec, args=({ask!r},)); t.start(); t.join()"
    handlers = f"import faulthandler; faulthandler.enable(); {ask}"
    children = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}])"
    for code in (threads, handlers, children):
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == "AVX2\n"
    fault = subprocess.run([sys.executable, "-c", "import ctypes; ctypes.string_at(0)"], env=env, check=False)
    assert fault.returncode == -signal.SIGSEGV
