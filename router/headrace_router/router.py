"""One router: its parts put together, listening, draining, stopping."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os

from aiohttp import web

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_router.admission import Admission
from headrace_router.api.cors import Cors
from headrace_router.app import make_app
from headrace_router.batcher import Batcher
from headrace_router.connection import Runner
from headrace_router.door import Door
from headrace_router.engine import Backend, Core
from headrace_router.grammars import GrammarChecker
from headrace_router.keys_file import KeysFile
from headrace_router.limits import Limits, find_limits
from headrace_router.metrics import Gauges, Metrics
from headrace_router.network import joining, role
from headrace_router.network.agent import Agent
from headrace_router.network.control import Control
from headrace_router.network.frames import Model
from headrace_router.network.gateway import Gateway
from headrace_router.network.lender import Lender
from headrace_router.network.registrar import Registrar
from headrace_router.network.role import Network, NetworkBackend
from headrace_router.network.tokens import WorkerTokens
from headrace_router.network.wire import to_request
from headrace_router.pace import Forecast, Pace
from headrace_router.presets import Preset, preset
from headrace_router.rates import Meters
from headrace_router.service import Service
from headrace_router.settings import RouterSettings
from headrace_router.shard_client import ShardClient
from headrace_router.tenants import Tenants
from headrace_router.text.pool import TextPool

log = logging.getLogger(__name__)

BACKLOG = 4096
CONNECT_SECONDS = 180.0  # a shard may have to compile its kernels first
FLUSH_SECONDS = 2.0  # for last frames, when running requests had to be ended


class Router:
    """A service behind a listening socket."""

    service: Service
    batcher: Core
    _runner: Runner

    def __init__(self, settings: RouterSettings) -> None:
        """Read the model folder.

        Raises:
            StartupError: it is not one, or a setting is missing or not usable.
        """
        is_gateway = settings.role == "gateway"
        if not settings.model_folder or not (settings.shard_target or is_gateway):
            raise StartupError("--model-folder and --shard-target are needed")
        self._settings = settings
        self._worker_tokens = WorkerTokens(role.check(settings)) if is_gateway else None
        self._agent: Agent | None = None
        self._control: Control | None = None
        self._own_token = joining.token(settings) if settings.gateway is not None else ""
        keys_file = KeysFile(settings.api_keys_file) if settings.api_keys_file else None
        self._tenants = Tenants(settings.api_key, keys_file, settings.workload)
        self._cors = Cors(settings.cors_allow_origin)
        self._folder = ModelFolder.open(settings.model_folder)
        self._text = TextPool(
            self._folder, settings.validation_workers, settings.tokenizer_config_path, settings.normalize,
            settings.tool_call_parser, settings.reasoning_parser,
        )
        self._grammars = GrammarChecker()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Connect to the shard and listen; returns the URL.

        Raises:
            StartupError: the shard does not answer or serves less than is asked for, or the address is taken.
        """
        settings = self._settings
        tokenizer_hash = hashlib.sha256(self._folder.tokenizer_path.read_bytes()).hexdigest()
        shard: Backend
        if settings.role == "gateway":
            broker = role.make_broker(settings, role.policy(settings, preset(settings)), tokenizer_hash)
            shard = NetworkBackend(self._folder, settings.model_id, self._text.tokenizer.vocab_size, broker)
        else:
            shard = ShardClient(settings.shard_target)
        self._shard = shard
        await shard.connect(CONNECT_SECONDS)
        limits = find_limits(settings, shard.info)
        metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
        tuned = preset(settings)
        batcher = self.batcher = self._make_core(shard, limits, metrics, tuned)
        network = None
        if isinstance(batcher, Gateway) and self._worker_tokens is not None:
            model_id = settings.model_id or shard.info.model_id
            registrar = Registrar(self._worker_tokens) if settings.allow_open_workers else None
            network = Network(batcher, self._worker_tokens, model_id, settings.model_sha, tokenizer_hash, registrar)
        gauges = Gauges(
            lambda: batcher.waiting, lambda: batcher.waiting_tokens, lambda: batcher.running, lambda: batcher.running_tokens,
            shard.capacity.max_batch_total_tokens,
        )
        meters, forecast = Meters(), Forecast()
        door = Door(tuned, batcher, forecast, lambda: self.service.retry_after())
        engine = Admission(batcher, batcher, meters, metrics, door, forecast)
        self.service = Service(
            settings, limits, shard, self._text, engine, metrics, gauges, self._tenants, meters, Pace(), forecast,
            tokenizer_hash, self._grammars, network,
        )
        app = make_app(self.service, self._cors)
        self._runner = Runner(app, settings.client_timeout, shutdown_timeout=FLUSH_SECONDS, lingering_time=2.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.hostname, settings.port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            where = f"{settings.hostname}:{settings.port}"
            raise StartupError(f"cannot listen on {where}: {error.strerror or error}") from None
        self._tasks = [*batcher.start(), asyncio.create_task(self._tenants.watch(), name="tenants-watch")]
        if network is not None:
            network.tokens.ensure_first()
            self._tasks.append(asyncio.create_task(network.watch(), name="worker-tokens-watch"))
        if settings.gateway is not None:
            model = Model(
                joining.told_name(self.service.model_name), settings.model_sha,
                shard.info.quantization or shard.info.dtype, tokenizer_hash,
                limits.max_input_tokens, limits.max_total_tokens, list(shard.info.features),
            )
            assert isinstance(batcher, Batcher)
            lender = Lender(
                settings.slots or limits.max_batch_size, settings.pause_above_load, free_tokens=lambda: batcher.free_tokens
            )
            self._agent = Agent(
                settings.gateway, self._own_token, model, lender, lambda frame: batcher.submit(to_request(frame))
            )
            self._tasks.append(asyncio.create_task(self._agent.run(), name="worker-agent"))
            if settings.worker_socket:
                self._control = Control(settings.worker_socket, str(os.getppid()), self._agent)
                await self._control.start()
        host, port = self._runner.addresses[0][:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        log.info("tuned for %s: %s", settings.workload, tuned)
        log.info("listening on %s", url)
        return url

    async def failed(self) -> None:
        """Return when a part has failed that everything depends on; logs why."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        task = next(iter(done))
        error = task.exception()
        if isinstance(error, StartupError):
            log.critical("%s", error)
        else:
            log.critical("%s failed", task.get_name(), exc_info=error)

    def _make_core(self, shard: Backend, limits: Limits, metrics: Metrics, tuned: Preset) -> Core:
        """What runs the requests: a shard group's batch, or a network of workers."""
        settings, tokenizer = self._settings, self._text.tokenizer
        if isinstance(shard, ShardClient):
            return Batcher(
                shard, tokenizer, limits, metrics, tuned.max_step_tokens, tuned.itl_target_ms, settings.shard_restarts
            )
        assert isinstance(shard, NetworkBackend)
        return Gateway(
            shard.broker, tokenizer, self._folder.eos_token_ids, limits.vocab_size, settings.no_worker_wait
        )

    @property
    def _holding(self) -> bool:
        """Are there requests that nobody is connected for, and that end with this process?"""
        network = self.service.network
        return bool(self.service.background) and not (network is not None and network.gateway.broker.durable)

    async def drain(self) -> None:
        """Refuse new requests and wait, no longer than the settings allow, until those that run have ended.

        Without a shard nothing can end by itself, so that there is no reason to wait.
        """
        self.service.draining = True
        if self._agent is not None:
            await self._agent.leave()
        seconds = self._settings.graceful_termination_timeout
        log.info("stopping; %d requests may take up to %g s", self.service.active, seconds)
        try:
            async with asyncio.timeout(seconds):
                while (self.service.active or self._holding) and self._shard.healthy:  # noqa: ASYNC110 - counted in the hot path
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("%d requests have not ended in time", self.service.active)

    async def stop(self) -> None:
        """End what still runs with an error event, and close everything."""
        if self._tasks:
            self.service.draining = True
            for task in self._tasks:
                task.cancel()
            problem = self._shard.problem
            await self.batcher.close(f"the shard is gone: {problem}" if problem else "the server is stopping")
            await self._runner.cleanup()
        if self._control is not None:
            await self._control.close()
        self._text.close()
        self._grammars.close()
        await self._shard.close()
