"""The flags of `headrace serve` and `headrace shard`: the union of the three processes' settings, checked together."""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from headrace._common import options
from headrace_launcher import embedded, tgi_flags
from headrace_launcher.settings import LauncherSettings
from headrace_router.settings import LendingSettings, RouterSettings, broker_problem
from headrace_shard.settings import ShardSettings, conflict

# Set by the launcher for its children; nobody types them here.
INTERNAL = frozenset({
    "draft_model_folder", "insecure", "model_folder", "model_sha", "pause_above_load", "rank", "shard_restarts", "shard_target",
    "worker_socket",
})


# Settings that mean something in one role only, where they differ from their defaults.
OF_GATEWAYS = (
    "allow_open_workers", "broker", "disconnect_grace", "max_queue_time", "max_run_time", "no_worker_wait", "stall_timeout",
)
OF_WORKERS = ("slots",)
# Settings of a worker that lends another server, beside those of that server.
OF_LENDING = frozenset({
    "gateway", "json_output", "log_level", "max_total_tokens", "model_id", "slots",
    "worker_token_file",
})
EMBEDDED = "embedded"  # as --broker


@dataclass(frozen=True)
class Plan:
    """What is to be started. `router` is None for a shard group alone."""

    launcher: LauncherSettings
    shard: ShardSettings
    router: RouterSettings | None
    lends_what_is_wanted: bool = False  # the model is the gateway's, whichever that is

    @property
    def is_gateway(self) -> bool:
        """Do requests run on other machines, so that there are no shards and no weights here?"""
        return self.router is not None and self.router.role == "gateway"

    @property
    def embedded_store(self) -> Path | None:
        """The folder of a broker of our own, if there is to be one."""
        if self.router is None or self.router.broker != EMBEDDED or self.router.worker_token_file is None:
            return None
        return embedded.folder_of(self.router.worker_token_file)

    @property
    def shards(self) -> int:
        """Shard processes to start."""
        return 0 if self.is_gateway else self.launcher.num_shard


def parameters(with_router: bool) -> list[click.Parameter]:
    """The click options of the command, hidden ones of other servers included."""
    made = options.parameters(_union(with_router))
    positive = click.IntRange(min=1)
    made.append(click.Option(["--max-input-length"], type=positive, envvar="MAX_INPUT_LENGTH", hidden=True))
    made.append(click.Option(["--sharded"], type=bool, envvar="SHARDED", hidden=True))
    return made + tgi_flags.parameters()


def plan(given: dict[str, Any], with_router: bool) -> Plan:
    """Settings of each process from the flags that were given and the environment.

    Raises:
        click.UsageError: a value is impossible, or two contradict each other; names both.
    """
    tgi_flags.warn_of_environment(lambda text: print(f"warning: {text}", file=sys.stderr))
    given = {**given, "max_input_tokens": _input_limit(given)}
    values = dataclasses.asdict(options.collect(_union(with_router), given))
    values["max_step_tokens"] = _step_budget(values)
    router = _take(RouterSettings, values) if with_router else None
    made = Plan(_take(LauncherSettings, values), _take(ShardSettings, values), router)
    _check_shards(made, given.get("sharded"))
    _check_limits(made.shard)
    if made.shard.dtype is not None and made.shard.quantize is not None:
        raise click.UsageError(conflict(made.shard.dtype, made.shard.quantize))
    if made.launcher.draft_model_id and made.shard.speculate == 0:
        raise click.UsageError(f"--speculate 0: the draft model {made.launcher.draft_model_id} would have nothing to guess")
    if made.router is not None:
        _check_router(made.router)
        _check_role(made.router, made.launcher)
    return made


def worker_plan(given: dict[str, Any]) -> Plan:
    """What a worker that serves a model itself starts: a service on a free port, unless it is told which.

    Raises:
        click.UsageError: as `plan`; or a flag is of workers that lend another server.
    """
    own = options.collect(LendingSettings, given)
    for name in ("upstream_api", "upstream_api_key"):
        if given[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is of workers that have --upstream")
    made = plan({**given, "port": given["port"] or 0}, with_router=True)
    assert made.router is not None
    if made.router.gateway is None:
        raise click.UsageError("a worker needs --gateway URL")
    return dataclasses.replace(
        made, router=dataclasses.replace(made.router, insecure=own.insecure, pause_above_load=own.pause_above_load),
        lends_what_is_wanted=not made.launcher.model_id,
    )


def lending(given: dict[str, Any]) -> tuple[RouterSettings, LendingSettings] | None:
    """Settings of a worker that lends another server; None: it serves a model itself.

    Raises:
        click.UsageError: a flag has no meaning for it; names the flag.
    """
    own = options.collect(LendingSettings, given)
    if own.upstream is None:
        return None
    known = OF_LENDING | {field.name for field in dataclasses.fields(LendingSettings)}
    for name, value in given.items():
        if value is not None and value != () and name not in known:
            raise click.UsageError(f"--{name.replace('_', '-')} has no meaning beside --upstream: no model is loaded here")
    settings = options.collect(RouterSettings, given)
    if settings.gateway is None:
        raise click.UsageError("a worker needs --gateway URL")
    return dataclasses.replace(settings, pause_above_load=own.pause_above_load), own


def _union(with_router: bool) -> type:
    """One settings class with every public field of the processes, shared names once."""
    fields: dict[str, tuple[str, Any, Any]] = {}
    for cls in (LauncherSettings, *([RouterSettings] if with_router else []), ShardSettings):
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name not in INTERNAL and field.name not in fields:
                made = dataclasses.field(default=field.default, metadata=field.metadata)
                fields[field.name] = (field.name, hints[field.name], made)
    return dataclasses.make_dataclass("Settings", list(fields.values()), frozen=True)


def _take(cls: type[options.S], values: dict[str, Any]) -> options.S:
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if name in names})


def _input_limit(given: dict[str, Any]) -> int | None:
    """--max-input-tokens, which older command lines call --max-input-length."""
    limit: int | None = given.get("max_input_tokens")
    old: int | None = given.get("max_input_length")
    if limit is not None and old is not None and limit != old:
        raise click.UsageError(f"--max-input-tokens {limit} and --max-input-length {old} are two names of one setting")
    return old if limit is None else limit


def _step_budget(values: dict[str, Any]) -> int | None:
    """--max-step-tokens, or TGI's --max-batch-prefill-tokens, which promises that a whole prompt fits into a step."""
    budget: int | None = values["max_step_tokens"]
    old: int | None = values["max_batch_prefill_tokens"]
    longest: int | None = values["max_input_tokens"]
    if old is None:
        return budget
    if budget is not None and budget != old:
        raise click.UsageError(f"--max-step-tokens {budget} and --max-batch-prefill-tokens {old} are two names of one setting")
    if longest is not None and old < longest:
        raise click.UsageError(
            f"--max-batch-prefill-tokens {old} is less than --max-input-tokens {longest}; "
            "for prompts that are computed in chunks say --max-step-tokens"
        )
    return old


def _check_shards(made: Plan, sharded: bool | None) -> None:
    count = made.launcher.num_shard
    if sharded is False and count > 1:
        raise click.UsageError(f"--sharded false contradicts --num-shard {count}")
    if made.shard.shard_tcp is not None and made.shard.shard_tcp + count - 1 > 65535:
        raise click.UsageError(f"--shard-tcp {made.shard.shard_tcp}: ports end at 65535")


def _check_limits(shard: ShardSettings) -> None:
    longest, total, room = shard.max_input_tokens, shard.max_total_tokens, shard.max_batch_total_tokens
    if longest is not None and total is not None and longest >= total:
        raise click.UsageError(
            f"--max-input-tokens {longest} must be less than --max-total-tokens {total}: there must be room for output"
        )
    if room is not None and total is not None and room < total:
        raise click.UsageError(
            f"--max-batch-total-tokens {room} is less than --max-total-tokens {total}: no longest request would fit"
        )


def _check_router(router: RouterSettings) -> None:
    if router.port > 65535:
        raise click.UsageError(f"--port {router.port}: ports end at 65535")
    if router.api_keys_file is not None and not os.access(router.api_keys_file, os.R_OK):
        raise click.UsageError(f"--api-keys-file {router.api_keys_file}: there is no such file, or it cannot be read")


def _check_role(router: RouterSettings, launcher: LauncherSettings) -> None:
    """Refuse flags that would have no effect in the role."""
    is_gateway = router.role == "gateway"
    given = {f.name for f in dataclasses.fields(router) if getattr(router, f.name) != f.default}
    for name in () if is_gateway else OF_GATEWAYS:
        if name in given:
            raise click.UsageError(f"--{name.replace('_', '-')} is of --role gateway")
    for name in OF_WORKERS if router.gateway is None else ():
        if name in given:
            raise click.UsageError(f"--{name.replace('_', '-')} is of workers, which have --gateway")
    if is_gateway and router.gateway is not None:
        raise click.UsageError("--role gateway and --gateway contradict each other: a worker is started by `headrace worker`")
    if is_gateway and router.worker_token_file is None:
        raise click.UsageError("--role gateway needs --worker-token-file, where it writes the first token of its workers")
    if is_gateway and router.broker != EMBEDDED and (problem := broker_problem(router.broker)) is not None:
        raise click.UsageError(problem)
    if is_gateway and launcher.num_shard > 1:
        raise click.UsageError(f"--num-shard {launcher.num_shard}: a gateway has no shards, its workers have")
    if is_gateway and launcher.draft_model_id:
        raise click.UsageError(f"--draft-model-id {launcher.draft_model_id}: a gateway runs no model, its workers do")
    if not is_gateway and router.gateway is None and router.worker_token_file is not None:
        raise click.UsageError("--worker-token-file is of --role gateway, or of workers, which have --gateway")


def child_environment(plan: Plan) -> dict[str, str]:
    """The environment of the children: settings reach them by flags, but not secrets, which `ps` would show."""
    classes = (LauncherSettings, RouterSettings, ShardSettings)
    ours = {options.env_name(field) for cls in classes for field in dataclasses.fields(cls)}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONSAFEPATH"] = "1"  # a file in the working folder must not take the place of a module
    if plan.router is not None and plan.router.api_key is not None:
        env["API_KEY"] = plan.router.api_key
    if plan.router is not None and "@" in plan.router.broker:
        env["HEADRACE_BROKER"] = plan.router.broker
    return env


def shard_command(shard: ShardSettings) -> list[str]:
    """The command line of one shard process."""
    return [sys.executable, "-m", "headrace_shard", *options.to_flags(shard)]


def router_command(router: RouterSettings) -> list[str]:
    """The command line of the router process; its API key, and a broker's URL with a password, come by the environment."""
    broker = RouterSettings.broker if "@" in router.broker else router.broker
    public = dataclasses.replace(router, api_key=None, broker=broker)
    return [sys.executable, "-m", "headrace_router", *options.to_flags(public)]
