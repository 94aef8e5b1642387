"""JSON shapes of what operators ask."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Info(Struct):
    """TGI's /info, the limits of the batch, and what a worker must match."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    max_batch_size: int
    max_client_batch_size: int
    validation_workers: int
    world_size: int
    block_size: int
    tokenizer_hash: str
    weight_format: str
    features: list[str]  # of the shard: what requests may ask for
    router: str
    version: str
    sha: str | None = None
    docker_label: str | None = None


class ModelOut(Struct, kw_only=True):
    """OpenAI's object of a model, with vLLM's `max_model_len`: the window in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str
    max_model_len: int


class ModelsOut(Struct, kw_only=True):
    """OpenAI's list of models."""

    object: Literal["list"] = "list"
    data: list[ModelOut]
