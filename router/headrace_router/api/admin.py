"""What operators and probes ask: health, readiness, facts, models, metrics."""

from __future__ import annotations

import msgspec
from aiohttp import web

import headrace
from headrace._common.errors import ModelNotFound, Unhealthy
from headrace_router import metrics as metrics_text
from headrace_router.api.admin_types import Info, ModelOut, ModelsOut
from headrace_router.network import exposition
from headrace_router.service import SERVICE, Service


async def health(request: web.Request) -> web.Response:
    """200 while the shard is well, however busy the service is."""
    if not request.app[SERVICE].shard.healthy:
        raise Unhealthy("unhealthy")
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    """200 while new requests are welcome."""
    service = request.app[SERVICE]
    if service.draining or not service.shard.healthy:
        raise Unhealthy("draining" if service.draining else "unhealthy")
    return web.Response()


async def info(request: web.Request) -> web.Response:
    """TGI's /info, the limits of the batch, and what a worker must match."""
    service = request.app[SERVICE]
    settings, limits, shard = service.settings, service.limits, service.shard
    body = Info(
        model_id=service.model_name, model_sha=settings.model_sha, model_dtype=shard.info.dtype,
        model_device_type=shard.info.device, model_pipeline_tag="text-generation",
        max_concurrent_requests=settings.max_concurrent_requests, max_best_of=limits.max_best_of,
        max_stop_sequences=limits.max_stop_sequences, max_top_n_tokens=limits.max_top_n_tokens,
        max_input_tokens=limits.max_input_tokens, max_total_tokens=limits.max_total_tokens,
        max_batch_total_tokens=shard.capacity.max_batch_total_tokens, max_batch_size=limits.max_batch_size,
        max_client_batch_size=limits.max_client_batch_size, validation_workers=settings.validation_workers,
        world_size=shard.info.world_size, block_size=shard.info.block_size, tokenizer_hash=service.tokenizer_hash,
        weight_format=shard.info.quantization or shard.info.dtype, features=list(shard.info.features),
        router="headrace-router", version=headrace.__version__,
    )
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _model(service: Service) -> ModelOut:
    name = service.model_name
    return ModelOut(id=name, owned_by=name, max_model_len=service.limits.max_total_tokens)


async def models(request: web.Request) -> web.Response:
    """The one model, in OpenAI's list."""
    body = ModelsOut(data=[_model(request.app[SERVICE])])
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def model(request: web.Request) -> web.Response:
    """The model by its name.

    Raises:
        ModelNotFound: it is not the one that is served.
    """
    service, name = request.app[SERVICE], request.match_info["model"]
    if name != service.model_name:
        raise ModelNotFound(f"the model `{name[:200]}` does not exist; `{service.model_name}` is served")
    return web.Response(body=msgspec.json.encode(_model(service)), content_type="application/json")


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format."""
    service = request.app[SERVICE]
    text = service.metrics.render(service.gauges)
    if service.network is not None:
        text += exposition.render(service.network.gateway, service.model_name)
    return web.Response(body=text.encode(), headers={"Content-Type": metrics_text.CONTENT_TYPE})
