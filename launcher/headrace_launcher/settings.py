"""The settings of the launcher itself. `headrace serve` takes these and the router's and shard's."""

from __future__ import annotations

from dataclasses import dataclass

from headrace._common.logs import LEVELS
from headrace._common.options import option


@dataclass(frozen=True)
class LauncherSettings:
    """What `headrace serve` needs to know before it starts anything."""

    model_id: str = option("", "hub id, folder of safetensors, or .gguf file; SmolLM2-135M-Instruct if not given")
    revision: str | None = option(None, "branch, tag or commit of a hub model")
    draft_model_id: str = option(
        "", "smaller model with the same vocabulary, given as --model-id is, whose guesses are tried; see --speculate",
        env="HEADRACE_DRAFT_MODEL_ID",
    )
    num_shard: int = option(1, "tensor-parallel shards", minimum=1)
    max_batch_prefill_tokens: int | None = option(
        None, "TGI's name of --max-step-tokens; not less than --max-input-tokens", minimum=1
    )
    huggingface_hub_cache: str | None = option(None, "cache folder of hub models")
    shard_uds_path: str = option("", "prefix of the shards' unix sockets; a private folder if not given")
    graceful_termination_timeout: float = option(
        90.0, "seconds that running requests get to finish at SIGTERM", flags=("-g",), minimum=0
    )
    max_restarts: int = option(
        0, "times that a dead shard group is started again, before its death ends the service",
        env="HEADRACE_MAX_RESTARTS", minimum=0,
    )
    log_level: str = option("info", "least level that is logged", choices=LEVELS)
    json_output: bool = option(False, "log JSON lines")
