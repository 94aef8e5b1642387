"""The process of one rank: what it loads, the gRPC server with reflection and health, its watchdog, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from llguidance import LLTokenizer

from headrace._common.errors import StartupError
from headrace._common.memory import trim_memory
from headrace._common.model_folder import ModelFolder
from headrace._common.tokenizing import Tokenizer
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_pb2_grpc as pb_grpc
from headrace_shard.batch import RunningBatch
from headrace_shard.executor import Executor
from headrace_shard.grammar.compiler import GrammarCompiler
from headrace_shard.grammar.vocabulary import can_constrain, vocabulary
from headrace_shard.kv.blocks import BLOCK_SIZE, BlockManager
from headrace_shard.loading import Loaded, load
from headrace_shard.parallel.group import GroupBroken, Trouble
from headrace_shard.parallel.runner import Follower, Leader
from headrace_shard.relay import Relay
from headrace_shard.sampling.params import Watermark
from headrace_shard.service import Deliveries, GenerationService
from headrace_shard.settings import ShardSettings
from headrace_shard.sockets import remove_sockets, rendezvous_path
from headrace_shard.wire import RequestLimits, RequestReader

CONTRACT_VERSION = "1"
SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name
OPTIONS = [
    ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0),
]
LOST_GROUP = 3  # exit status of a rank that ends because another one did
WATCH_SECONDS = 0.5
FLUSH_SECONDS = 1.0  # for clients to read how their requests ended, before a failed process goes
log = logging.getLogger(__name__)


class Role(Protocol):
    """What a rank does: lead the group, or follow."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Put the service into the server."""

    def start(self) -> None:
        """Begin to run steps."""

    def trouble(self) -> Trouble | None:
        """Why this rank is not healthy, or None."""

    async def stop(self) -> None:
        """Run no further step."""


class LeadingRole:
    """Rank 0: the executor with its scheduler, and the whole service."""

    def __init__(
        self, settings: ShardSettings, folder: ModelFolder, loaded: Loaded, tokenizer: Tokenizer,
        tokens: LLTokenizer | None,
    ) -> None:
        """`tokens`: None where output cannot be constrained."""
        deliveries = Deliveries(asyncio.get_running_loop())
        limits, vocab = loaded.limits, loaded.model.vocab_size
        grammars = GrammarCompiler(tokens, vocab) if tokens else None
        self._executor = Executor(
            Leader(loaded.model, loaded.group), RunningBatch(loaded.rows, limits.max_total_tokens),
            BlockManager(limits.blocks), eos_ids=frozenset(folder.eos_token_ids), vocab_size=vocab,
            max_step_tokens=loaded.max_step_tokens, batch_lease=settings.batch_lease, deliver=deliveries.deliver,
            step_deadline=loaded.step_deadline, prefix_caching=settings.prefix_caching, speculate=settings.drafts,
            draft=loaded.draft, grammars=grammars, passes=loaded.passes, prompts_differ=loaded.prompts_differ,
        )
        admitted = RequestLimits(limits.max_input_tokens, limits.max_total_tokens, vocab)
        watermark = Watermark(settings.watermark_gamma, settings.watermark_delta)
        self._service = GenerationService(
            self._executor, deliveries, RequestReader(admitted, tokenizer, watermark, grammars),
            info(settings, folder, loaded, grammars is not None), warmup(loaded),
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_GenerationServicer_to_server(self._service, server)

    def start(self) -> None:
        self._executor.start()

    def trouble(self) -> Trouble | None:
        return self._executor.trouble()

    async def stop(self) -> None:
        await asyncio.to_thread(self._executor.stop)


class FollowingRole:
    """Any other rank: runs the steps that the leader sends, relays calls to it."""

    def __init__(self, settings: ShardSettings, folder: ModelFolder, loaded: Loaded) -> None:
        self._follower = Follower(loaded.model, loaded.group, loaded.step_deadline)
        leader = f"unix:{settings.shard_uds_path}-0"
        self._relay = Relay(leader, info(settings, folder, loaded, can_constrain(folder)), self._follower.trouble)

    def add_to(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((self._relay,))

    def start(self) -> None:
        self._follower.start()

    def trouble(self) -> Trouble | None:
        return self._follower.trouble()

    async def stop(self) -> None:
        await self._relay.close()


async def serve(settings: ShardSettings, path: str, import_seconds: float) -> int:
    """Load, listen, and run until SIGTERM or SIGINT; returns the exit status.

    Raises:
        StartupError: the model cannot be served, or the address not be bound.
        GroupBroken: another rank was lost while this one loaded.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    begin = time.perf_counter()
    folder = ModelFolder.open(settings.model_folder)
    tokenizer = Tokenizer(folder.tokenizer_path) if settings.rank == 0 else None
    tokens = vocabulary(folder) if tokenizer else None
    trim_memory()  # what making them took is not to come on top of the weights
    loading = asyncio.ensure_future(asyncio.to_thread(load, settings, folder, rendezvous_path(settings)))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        remove_sockets(settings, path)
        os._exit(0)  # told to stop while the weights load
    loaded = await loading
    load_seconds = time.perf_counter() - begin - loaded.warmup_seconds
    role: Role = (
        LeadingRole(settings, folder, loaded, tokenizer, tokens) if tokenizer else FollowingRole(settings, folder, loaded)
    )
    server, standard = build_server(role)
    bind(server, settings, path)
    role.start()
    await server.start()
    trim_memory()  # what loading leaves behind is larger than what it keeps
    gc.freeze()  # else a full collection walks through torch's objects every few thousand steps
    if settings.rank == 0:
        log.info("%s", loaded.roofline)
    log.info("KV cache: %s", loaded.limits.explanation)
    log.info("ready: import %.1f s, load %.1f s, warm-up %.1f s", import_seconds, load_seconds, loaded.warmup_seconds)
    watching = asyncio.ensure_future(watch(role, standard))
    try:
        await asyncio.wait({watching, stopped}, return_when=asyncio.FIRST_COMPLETED)
        status = await watching if watching.done() and not stop.is_set() else 0
        await role.stop()
        await server.stop(grace=FLUSH_SECONDS)
        return status
    finally:
        watching.cancel()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def build_server(role: Role) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """A server with the service, grpc.health.v1 and reflection."""
    server = grpc.aio.server(options=OPTIONS)
    role.add_to(server)
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


async def watch(role: Role, standard: health.aio.HealthServicer) -> int:
    """Keep grpc.health.v1 true; of a rank in trouble, write why (and the stacks, if it hangs) and return its exit status."""
    statuses = health_pb2.HealthCheckResponse
    await report(standard, statuses.SERVING)
    while not (trouble := role.trouble()):  # noqa: ASYNC110 - looks at another thread
        await asyncio.sleep(WATCH_SECONDS)
    await report(standard, statuses.NOT_SERVING)
    if trouble.kind == "hung":
        log.error("the stacks of all threads of a process that hangs:")
        faulthandler.dump_traceback(all_threads=True)
    log.log(logging.WARNING if trouble.kind == "lost" else logging.ERROR, "%s", trouble.reason)
    await asyncio.sleep(FLUSH_SECONDS)
    if trouble.kind == "hung":
        os._exit(1)  # the executor's thread cannot be ended
    return LOST_GROUP if trouble.kind == "lost" else 1


async def report(standard: health.aio.HealthServicer, status: int) -> None:
    """Set what grpc.health.v1 answers."""
    for name in ("", SERVICE):
        await standard.set(name, status)


def info(settings: ShardSettings, folder: ModelFolder, loaded: Loaded, grammar: bool) -> pb.InfoResponse:
    """The answer to Info. `grammar`: output can be constrained."""
    limits = loaded.limits
    features = ["logprobs", "top_n_tokens", "prompt_logprobs", "prompt_top_n_tokens", "watermark", "resume"]
    if settings.prefix_caching:
        features.append("prefix_caching")
    if grammar:
        features.append("grammar")
    return pb.InfoResponse(
        model_id=settings.model_id or Path(settings.model_folder).name, dtype=loaded.dtype,
        quantization=loaded.quantization, device=loaded.device,
        rank=settings.rank, world_size=settings.num_shard, leader=settings.rank == 0,
        vocab_size=loaded.model.vocab_size, eos_token_ids=folder.eos_token_ids,
        max_input_tokens=limits.max_input_tokens, max_total_tokens=limits.max_total_tokens, max_batch_size=loaded.rows,
        max_step_tokens=loaded.max_step_tokens, block_size=BLOCK_SIZE, blocks=limits.blocks,
        features=features, contract_version=CONTRACT_VERSION,
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
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # for whoever wants to see where a process is
    try:
        status: Any = uvloop.run(serve(settings, path, import_seconds))
    except StartupError as error:
        log.error("%s", error)
        status = 1
    except GroupBroken as error:
        log.warning("%s", error)
        status = LOST_GROUP
    # Collectives that wait for a lost rank would keep the interpreter from ending.
    logging.shutdown()
    os._exit(int(status))
