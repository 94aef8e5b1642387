"""The settings of a shard process. Free of torch: the launcher imports this module."""

from __future__ import annotations

from dataclasses import dataclass

from headrace._common.logs import LEVELS
from headrace._common.options import option

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "q4")
CPU_ISAS = ("portable", "avx2", "avx512", "amx")  # instruction sets of the CPU kernels, the least first
DRAFTS = 4  # draft tokens of a request and step where there is a draft model


@dataclass(frozen=True)
class ShardSettings:
    """What one shard process is started with."""

    model_folder: str = option("", "folder with config, tokenizer and weights, as the launcher resolves it", env=None)
    model_id: str = option("", "name under which the model is served")
    rank: int = option(0, "rank of this process in the shard group", minimum=0)
    num_shard: int = option(1, "tensor-parallel shards", minimum=1)
    shard_uds_path: str = option("", "prefix of the unix sockets; rank N listens on PREFIX-N")
    shard_tcp: int | None = option(
        None, "also listen on this port plus the rank, on loopback", env="HEADRACE_SHARD_TCP", minimum=1
    )
    dtype: str | None = option(
        None, "data type of the weights; float32 is the exact mode; if not given they stay as the model's files have them",
        choices=DTYPES,
    )
    quantize: str | None = option(
        None, "pack the weights to 8 bits, or to 4 with an output head of 8; what has fewer bits already stays so",
        choices=QUANTIZATIONS,
    )
    max_input_tokens: int | None = option(
        None, "longest prompt, in tokens; one less than --max-total-tokens if not given", minimum=1
    )
    max_total_tokens: int | None = option(
        None, "longest prompt plus output, in tokens; the model's own if not given", minimum=2
    )
    max_step_tokens: int | None = option(
        None, "token budget of one step; 256 on a CPU if not given", env="HEADRACE_MAX_STEP_TOKENS", minimum=1
    )
    max_batch_total_tokens: int | None = option(
        None, "tokens that the KV cache holds; computed from free memory if not given", minimum=16
    )
    max_batch_size: int | None = option(None, "requests that run at once; 256 if not given", minimum=1)
    prefix_caching: bool = option(True, "let requests that begin alike share what was computed", env="PREFIX_CACHING")
    speculate: int | None = option(
        None, "draft tokens of a request and step, guessed from its own text or by a draft model; 0, or 4 with such a model, "
        "if not given", minimum=0,
    )
    draft_model_folder: str = option("", "folder of a smaller model with the same vocabulary, whose guesses count", env=None)
    batch_lease: float = option(60.0, "seconds until a batch without a call is freed", env="HEADRACE_BATCH_LEASE", minimum=0)
    threads: int | None = option(None, "CPU threads of a shard; all cores if not given", env="HEADRACE_THREADS", minimum=1)
    max_cpu_isa: str | None = option(
        None, "highest instruction set that the CPU kernels may use; the best that the CPU has if not given",
        env="HEADRACE_MAX_CPU_ISA", choices=CPU_ISAS,
    )
    watermark_gamma: float = option(0.5, "share of the vocabulary on the green list of a watermark", minimum=0)
    watermark_delta: float = option(2.0, "what a watermark adds to the logits of green tokens", minimum=0)
    log_level: str = option("info", "least level that is logged", choices=LEVELS)
    json_output: bool = option(False, "log JSON lines")

    @property
    def drafts(self) -> int:
        """Draft tokens of a request and step."""
        if self.speculate is None:
            return DRAFTS if self.draft_model_folder else 0
        return self.speculate


def conflict(dtype: str, quantize: str) -> str:
    """What is wrong with both flags together."""
    return f"--dtype {dtype} and --quantize {quantize} each say in which format the weights are held: give one"
