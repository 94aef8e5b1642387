"""What a router in the role of a gateway has in place of a shard: the network of workers, and who may join it."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from pathlib import PurePath

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace.v1 import generation_pb2 as pb
from headrace_router.network.broker import Broker
from headrace_router.network.frames import TEXT, Hello
from headrace_router.network.gateway import Gateway
from headrace_router.network.jobs import Policy
from headrace_router.network.memory import MemoryBroker
from headrace_router.network.registrar import Registrar
from headrace_router.network.tokens import WorkerTokens
from headrace_router.presets import Preset
from headrace_router.settings import RouterSettings, broker_problem

log = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
BROKER_GRACE = 30.0  # seconds that a shared broker may be away before what waits for it ends
MOST_REQUESTS = 1024  # at workers at once; what a gateway tells as its batch size
MOST_SLOTS = 1024  # of one worker
DEFAULT_LENGTH = 4096  # tokens, of a model that does not say its own
WATCH_SECONDS = 1.0
FEATURES = ("logprobs", "top_n_tokens", "prompt_logprobs", "prompt_top_n_tokens", "watermark", "grammar")


class NetworkBackend:
    """The facts that a shard would tell, from the model folder: a gateway has no weights and no torch."""

    def __init__(self, folder: ModelFolder, model_id: str, tokens: int, broker: Broker) -> None:
        """`tokens`: of the tokenizer, for a config that does not say how large its vocabulary is."""
        total = folder.max_positions or DEFAULT_LENGTH
        self.info = pb.InfoResponse(
            model_id=model_id, device="network", vocab_size=int(folder.text_config.get("vocab_size") or tokens),
            eos_token_ids=folder.eos_token_ids, max_input_tokens=total - 1, max_total_tokens=total,
            max_batch_size=MOST_REQUESTS, features=FEATURES,
        )
        self.capacity = pb.WarmupResponse(max_batch_total_tokens=total * MOST_REQUESTS)
        self.broker = broker

    @property
    def problem(self) -> str | None:
        return self.broker.problem

    @property
    def healthy(self) -> bool:
        return self.problem is None

    async def connect(self, patience: float) -> None:
        """Workers come and go; what is waited for is what the broker keeps its jobs in."""
        await self.broker.start(patience)

    async def close(self) -> None:
        """Nothing is open."""


@dataclass
class Network:
    """The gateway, and whom it lets in."""

    gateway: Gateway
    tokens: WorkerTokens
    model_id: str
    model_sha: str | None
    tokenizer_hash: str
    registrar: Registrar | None  # who gives tokens to strangers, if they may join

    def mismatch(self, hello: Hello) -> str | None:
        """Why a worker cannot serve this gateway's model, naming both sides; None if it can.

        Names are compared without the folder that they are in, which is each machine's own.
        """
        if not hello.models or hello.slots < 1:
            return "the worker serves no model, or has no slots"
        model = hello.models[0]
        if PurePath(model.id).name != PurePath(self.model_id).name:
            return f"the model is {self.model_id} here, {model.id[:200]} there"
        if None not in (model.revision, self.model_sha) and model.revision != self.model_sha:
            return f"the revision is {self.model_sha} here, {str(model.revision)[:64]} there"
        if TEXT in model.features and model.tokenizer_hash is None:  # it need not know how its server tokenizes
            return None
        if model.tokenizer_hash != self.tokenizer_hash:
            there = str(model.tokenizer_hash)[:12]
            return f"the tokenizer of {self.model_id} is {self.tokenizer_hash[:12]} here, {there} there"
        return None

    async def watch(self) -> None:
        """Read the workers' tokens again when they change, and cut off those whose token does not count; never returns."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                self.tokens.reload()
            except StartupError as error:
                log.error("the worker tokens are not reloaded: %s", error)
                continue
            for session in list(self.gateway.sessions.values()):
                if (lapse := self.tokens.lapse(session.worker)) is not None:
                    session.close(4401, lapse)


def policy(settings: RouterSettings, tuned: Preset) -> Policy:
    """The broker's rules."""
    return Policy(
        tuned.max_queue_size, tuned.max_queue_tokens, max_queue_time=settings.max_queue_time,
        max_run_time=settings.max_run_time, lease=LEASE_SECONDS, stall=settings.stall_timeout,
    )


def make_broker(settings: RouterSettings, rules: Policy, tokenizer_hash: str) -> Broker:
    """What keeps the gateway's requests; gateways of one model share them in one server.

    Raises:
        StartupError: the URL is none, or a package is missing for it.
    """
    if settings.broker == "memory://":
        return MemoryBroker(rules)
    from headrace_router.network.shared import SharedBroker  # here, since its client is an extra

    name = re.sub(r"[^\w.-]", "_", PurePath(settings.model_id).name)
    return SharedBroker(settings.broker, rules, f"{name}:{tokenizer_hash[:12]}", grace=BROKER_GRACE)


def check(settings: RouterSettings) -> str:
    """The file of the gateway's tokens.

    Raises:
        StartupError: a setting is missing, or asks for what there is not.
    """
    if (problem := broker_problem(settings.broker)) is not None:
        raise StartupError(problem)
    if settings.gateway is not None:
        raise StartupError("--gateway is for workers; a gateway has --role gateway")
    if settings.worker_token_file is None:
        raise StartupError("--role gateway needs --worker-token-file: the first token of its workers is written there")
    return settings.worker_token_file
