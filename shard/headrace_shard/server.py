"""The process of one rank: sockets, the gRPC server with reflection and health, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace._common.tokenizing import Tokenizer
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_pb2_grpc as pb_grpc
from headrace_shard.batch import RunningBatch
from headrace_shard.executor import Executor
from headrace_shard.kv.blocks import BLOCK_SIZE, BlockManager
from headrace_shard.loading import Loaded, load
from headrace_shard.service import Deliveries, GenerationService
from headrace_shard.settings import ShardSettings
from headrace_shard.wire import RequestLimits, RequestReader

CONTRACT_VERSION = "1"
SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name
OPTIONS = [
    ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0),
]
STEP_DEADLINE = 10.0  # seconds, or this many times the warm-up's step if that is more:
STEP_DEADLINE_FACTOR = 20
log = logging.getLogger(__name__)


async def serve(settings: ShardSettings, path: str, import_seconds: float) -> None:
    """Load, listen, and run until SIGTERM or SIGINT.

    Raises:
        StartupError: the model cannot be served, or the address not be bound.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    begin = time.perf_counter()
    folder = ModelFolder.open(settings.model_folder)
    loading = asyncio.ensure_future(asyncio.to_thread(load, settings, folder))
    tokenizer = Tokenizer(folder.tokenizer_path)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        os._exit(0)  # told to stop while the weights load: nothing is open yet
    loaded = await loading
    load_seconds = time.perf_counter() - begin - loaded.warmup_seconds
    deliveries = Deliveries(loop)
    blocks = BlockManager(loaded.limits.blocks)
    executor = Executor(
        loaded.model, RunningBatch(loaded.rows, loaded.limits.max_total_tokens), blocks,
        eos_ids=frozenset(folder.eos_token_ids), vocab_size=loaded.model.vocab_size,
        max_step_tokens=loaded.max_step_tokens, batch_lease=settings.batch_lease, deliver=deliveries.deliver,
        step_deadline=max(STEP_DEADLINE, STEP_DEADLINE_FACTOR * loaded.slowest_step),
    )
    reader = RequestReader(
        RequestLimits(loaded.limits.max_input_tokens, loaded.limits.max_total_tokens, loaded.model.vocab_size), tokenizer
    )
    service = GenerationService(executor, deliveries, reader, info(settings, folder, loaded), warmup(loaded))
    server, standard = build_server(service)
    bind(server, settings, path)
    executor.start()
    await server.start()
    log.info("KV cache: %s", loaded.limits.explanation)
    log.info("ready: import %.1f s, load %.1f s, warm-up %.1f s", import_seconds, load_seconds, loaded.warmup_seconds)
    watching = asyncio.ensure_future(_report_health(executor, standard))
    try:
        await stop.wait()
    finally:
        watching.cancel()
        executor.stop()
        await server.stop(grace=1.0)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def build_server(service: GenerationService) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """A server with the service, grpc.health.v1 and reflection."""
    server = grpc.aio.server(options=OPTIONS)
    pb_grpc.add_GenerationServicer_to_server(service, server)
    standard = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(standard, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server, standard


def bind(server: grpc.aio.Server, settings: ShardSettings, path: str) -> None:
    """Listen on the socket, and on loopback TCP if asked.

    Raises:
        StartupError: an address cannot be bound; names it.
    """
    addresses = [f"unix:{path}"]
    if settings.shard_tcp is not None:
        addresses.append(f"127.0.0.1:{settings.shard_tcp + settings.rank}")
    for address in addresses:
        try:
            server.add_insecure_port(address)
        except RuntimeError:
            raise StartupError(f"cannot listen on {address}: it is in use or not permitted") from None
        log.info("listening on %s", address)
    os.chmod(path, 0o600)


async def _report_health(executor: Executor, standard: health.aio.HealthServicer) -> None:
    """Keep grpc.health.v1 as good or bad as `Health`."""
    statuses = health_pb2.HealthCheckResponse
    while True:
        status = statuses.NOT_SERVING if executor.stuck() else statuses.SERVING
        for name in ("", SERVICE):
            await standard.set(name, status)
        await asyncio.sleep(1.0)


def info(settings: ShardSettings, folder: ModelFolder, loaded: Loaded) -> pb.InfoResponse:
    """The answer to Info."""
    return pb.InfoResponse(
        model_id=settings.model_id or Path(settings.model_folder).name, dtype=loaded.dtype, device=loaded.device,
        rank=settings.rank, world_size=settings.num_shard, leader=settings.rank == 0, vocab_size=loaded.model.vocab_size,
        eos_token_ids=folder.eos_token_ids, max_input_tokens=loaded.limits.max_input_tokens,
        max_total_tokens=loaded.limits.max_total_tokens, max_batch_size=loaded.rows,
        max_step_tokens=loaded.max_step_tokens, block_size=BLOCK_SIZE, blocks=loaded.limits.blocks,
        features=["logprobs", "top_n_tokens", "prompt_logprobs", "resume"], contract_version=CONTRACT_VERSION,
    )


def warmup(loaded: Loaded) -> pb.WarmupResponse:
    """The answer to Warmup."""
    return pb.WarmupResponse(
        max_batch_total_tokens=loaded.limits.blocks * BLOCK_SIZE, explanation=loaded.limits.explanation,
        slowest_step_seconds=loaded.slowest_step,
    )


def run(settings: ShardSettings, path: str, import_seconds: float) -> int:
    """The whole life of the process; returns its exit status."""
    import uvloop

    sys.setswitchinterval(0.0005)  # the executor must not hold the GIL for 5 ms against the streams
    try:
        uvloop.run(serve(settings, path, import_seconds))
    except StartupError as error:
        log.error("%s", error)
        return 1
    return 0
