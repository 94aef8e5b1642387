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
    router: str
    version: str
    sha: str | None = None
    docker_label: str | None = None


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Struct):
    """OpenAI's list of models."""

    object: Literal["list"]
    data: list[Model]
