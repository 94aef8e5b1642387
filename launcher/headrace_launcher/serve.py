"""`headrace serve` and `headrace shard`: from checked settings to running processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import sys
import time
from types import FrameType

from headrace._common import logs
from headrace._common.errors import HeadraceError
from headrace_launcher import sockets
from headrace_launcher.arguments import Plan
from headrace_launcher.children import json_line
from headrace_launcher.lending import worker_socket
from headrace_launcher.models.draft import check_vocabulary
from headrace_launcher.models.resolve import Resolved, resolve
from headrace_launcher.private import CacheProvider, private_folder, run_base
from headrace_launcher.supervisor import Started, Supervisor
from headrace_router.settings import RouterSettings

log = logging.getLogger(__name__)


def serve(plan: Plan) -> int:
    """Run until a signal or a failure; returns the exit status. The last line on stderr says why it failed."""
    began = time.monotonic()
    logs.setup("launcher", plan.launcher.log_level, plan.launcher.json_output)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with contextlib.ExitStack() as stack:
            plan = _check_ports(plan)
            prefix = plan.launcher.shard_uds_path
            if prefix:
                prefix = os.path.abspath(prefix)
                sockets.prepare_prefix(prefix, plan.shards)
            else:
                prefix = str(stack.enter_context(private_folder(run_base())) / "shard")
            if plan.router is not None and plan.router.gateway is not None:
                plan = _join(plan, plan.router, plan.router.gateway, stack)
            model = find_model(plan, stack)
            plan = with_draft(plan, model, stack)
            asyncio.run(Supervisor(plan, model, prefix, functools.partial(_announce, plan), began).run())
    except HeadraceError as error:
        complain(str(error), plan.launcher.json_output)
        return 1
    except KeyboardInterrupt:
        log.info("stopped before anything was started")
    return 0


def _join(plan: Plan, router: RouterSettings, gateway: str, stack: contextlib.ExitStack) -> Plan:
    """The plan of a worker with a token and a control socket; `headrace worker` without a model serves the gateway's."""
    from headrace_router.network import joining

    launcher = plan.launcher
    if router.worker_token_file is None:
        router = dataclasses.replace(router, worker_token_file=joining.own_token_file(gateway, router.insecure))
    if plan.lends_what_is_wanted:
        launcher = dataclasses.replace(launcher, model_id=joining.demanded_model(gateway, router.insecure))
        log.info("the gateway serves %s", launcher.model_id)
    return dataclasses.replace(plan, launcher=launcher, router=dataclasses.replace(router, worker_socket=worker_socket(stack)))


def find_model(plan: Plan, stack: contextlib.ExitStack) -> Resolved:
    """The model folder; what had to go to a temporary folder is removed when `stack` closes."""
    settings = plan.launcher
    caches = CacheProvider(stack, log.warning)
    return resolve(
        settings.model_id, settings.revision, settings.huggingface_hub_cache, caches, log.info, weights=not plan.is_gateway
    )


def with_draft(plan: Plan, model: Resolved, stack: contextlib.ExitStack) -> Plan:
    """The plan with the folder of the draft model, if there is to be one.

    Raises:
        StartupError: there is no such model, or its vocabulary is not the model's.
    """
    settings = plan.launcher
    if not settings.draft_model_id:
        return plan
    caches = CacheProvider(stack, log.warning)
    draft = resolve(settings.draft_model_id, None, settings.huggingface_hub_cache, caches, log.info)
    check_vocabulary(model, draft)
    return dataclasses.replace(plan, shard=dataclasses.replace(plan.shard, draft_model_folder=str(draft.folder)))


def complain(text: str, as_json: bool) -> None:
    """The one line that says why the process ends, whatever the log level."""
    line = " ".join(text.split())
    with contextlib.suppress(OSError):
        print(json_line("ERROR", "launcher", line) if as_json else f"error: {line}", file=sys.stderr, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _check_ports(plan: Plan) -> Plan:
    """The plan with a definite HTTP port, after a look at whether every port is free."""
    if plan.shard.shard_tcp is not None:
        for rank in range(plan.shards):
            sockets.check_port("127.0.0.1", plan.shard.shard_tcp + rank, "--shard-tcp")
    router = plan.router
    if router is None:
        return plan
    if not sockets.is_loopback(router.hostname) and router.api_key is None and router.api_keys_file is None:
        log.warning("listening on %s without --api-key: all who reach it can use the model", router.hostname)
    port = sockets.check_port(router.hostname, router.port, "--port")
    return dataclasses.replace(plan, router=dataclasses.replace(router, port=port))


def _announce(plan: Plan, started: Started) -> None:
    """Print the one line on stdout that says that the service is ready."""
    where = started.router_url or started.shard_target
    if started.router_url is None and plan.shard.shard_tcp is not None:
        where += f" and 127.0.0.1:{plan.shard.shard_tcp}"
    text = f"{started.model} is served at {where} (ready after {started.seconds:.1f} s: {started.breakdown})"
    if plan.launcher.json_output:
        text = json_line("INFO", "launcher", text, url=where, seconds=round(started.seconds, 3))
    with contextlib.suppress(OSError):
        print(text, flush=True)
