"""The command line. Light on imports: what a command needs beyond settings is imported when it runs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from headrace import __version__
from headrace._common import logs, options
from headrace_launcher import arguments
from headrace_router.settings import LendingSettings
from headrace_shard.settings import QUANTIZATIONS

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120, "auto_envvar_prefix": None}


def _serve(**given: Any) -> int:
    from headrace_launcher.serve import serve

    return serve(arguments.plan(given, with_router=True))


@click.pass_context
def _worker(context: click.Context, /, **given: Any) -> int:
    if context.invoked_subcommand is not None:
        return 0
    if (lent := arguments.lending(given)) is not None:
        from headrace_launcher import lending

        return lending.lend(*lent)
    from headrace_launcher.serve import serve

    return serve(arguments.worker_plan(given))


def _shard(**given: Any) -> int:
    from headrace_launcher.serve import serve

    return serve(arguments.plan(given, with_router=False))


def _print_env(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from headrace_launcher import doctor

        for line in doctor.runtime_information():
            click.echo(line)
        context.exit()


def _group_parameters(with_router: bool) -> list[click.Parameter]:
    env = click.Option(
        ["-e", "--env"], is_flag=True, is_eager=True, expose_value=False, callback=_print_env,
        help="print versions and the machine, then exit",
    )
    version = click.version_option(__version__, prog_name="headrace")(click.Command("version")).params[0]
    return [*arguments.parameters(with_router), env, version]


serve_command = click.Command(
    "serve", callback=_serve, params=_group_parameters(True), context_settings=_CONTEXT,
    help="Serve a model over HTTP: start its shards and the router, watch them, and stop them in order.",
)

worker_command = click.Group(
    "worker", callback=_worker, params=[*options.parameters(LendingSettings), *_group_parameters(True)],
    context_settings=_CONTEXT, invoke_without_command=True,
    help="""Lend this machine to a gateway.

    \b
    headrace worker --gateway wss://HOST                        serve the gateway's model, and run its requests
    headrace worker --gateway wss://HOST --upstream http://...  have a server that runs already do so
    headrace worker status | pause [NAME] | resume [NAME]       of the workers on this machine

    Without --worker-token-file the worker registers itself, where the gateway takes strangers, and keeps its token for next
    time. Its own API is on a free port unless --port says otherwise. Ctrl-C gives back what runs, at once; nothing is lost.""",
)


def _control(do: str, help: str) -> click.Command:
    def callback(name: str | None) -> int:
        from headrace_launcher import lending

        return lending.control(do, name)

    argument = click.Argument(["name"], required=False)
    return click.Command(do, callback=callback, params=[argument], context_settings=_CONTEXT, help=help)


worker_command.add_command(_control("status", "Show what the workers on this machine do, or that of this NAME."))
worker_command.add_command(_control("pause", "Have a worker take no new requests; those that run go on to their end."))
worker_command.add_command(_control("resume", "Have a worker take requests again."))

shard_command = click.Command(
    "shard", callback=_shard, params=_group_parameters(False), context_settings=_CONTEXT,
    help="Serve a model over gRPC alone: a shard group without a router.",
)


@click.group(context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="headrace")
def headrace() -> None:
    """Headrace, a server for large language models."""


@headrace.command()
@click.argument("prompt", required=False)
@click.option("--url", help="the server [default http://127.0.0.1:$PORT, 3000]")
@click.option("--api-key", help="its key [env API_KEY]")
@click.option("--system", help="system message")
@click.option("--max-tokens", type=click.IntRange(min=1), help="longest answer, in tokens")
def chat(prompt: str | None, url: str | None, api_key: str | None, system: str | None, max_tokens: int | None) -> int:
    """Talk to a running server; with PROMPT, ask once and end."""
    from headrace_launcher import chat as client

    url = url or f"http://127.0.0.1:{os.environ.get('PORT') or 3000}"
    return client.run(client.Client(url, api_key or os.environ.get("API_KEY"), max_tokens), system, prompt)


@headrace.command()
@click.option("--model-id", default="", help="hub id, folder or .gguf file; the default model if not given")
@click.option("--revision", help="branch, tag or commit of a hub model")
@click.option("--huggingface-hub-cache", help="cache folder of hub models")
def resolve(model_id: str, revision: str | None, huggingface_hub_cache: str | None) -> int:
    """Download, check and convert a model, and print its model folder."""
    return _prepare(model_id, revision, huggingface_hub_cache, click.echo)


def _prepare(model_id: str, revision: str | None, hub_cache: str | None, use: Callable[[Path], None]) -> int:
    """Find a model and do something with its folder; the exit status."""
    from headrace._common.errors import StartupError
    from headrace_launcher.models.resolve import resolve as find
    from headrace_launcher.private import CacheProvider

    logs.setup("launcher")
    log = logging.getLogger(__name__)
    try:
        with contextlib.ExitStack() as stack:
            use(find(model_id, revision, hub_cache, CacheProvider(stack, log.warning), log.info).folder)
    except StartupError as error:
        click.echo(f"error: {error}", err=True)
        return 1
    return 0


@headrace.command()
@click.argument("model_id")
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--quantize", type=click.Choice(QUANTIZATIONS), default="int8", help="8 bits, or 4 with an output head of 8")
@click.option("--revision", help="branch, tag or commit of a hub model")
@click.option("--huggingface-hub-cache", help="cache folder of hub models")
def quantize(model_id: str, output: Path, quantize: str, revision: str | None, huggingface_hub_cache: str | None) -> int:
    """Pack the safetensors model MODEL_ID once, into the new folder OUTPUT, which is then served as --model-id OUTPUT."""
    from headrace_launcher.models import packing

    return _prepare(
        model_id, revision, huggingface_hub_cache, lambda folder: packing.quantize(folder, output.absolute(), quantize)
    )


@headrace.command()
@click.option("--port", type=click.IntRange(0, 65535), default=3000, help="HTTP port to look at")
def doctor(port: int) -> int:
    """Check what a server needs on this machine, one line each."""
    from headrace_launcher import doctor as checks

    return checks.run(port)


_FILE = click.Path(path_type=Path, dir_okay=False)


@headrace.command()
@click.option("--url", help="the server [default http://127.0.0.1:$PORT, 3000]")
@click.option("--api", type=click.Choice(("openai", "completions", "tgi")), default="openai", show_default=True)
@click.option("--model", help="its name; the first of /v1/models if not given")
@click.option("--api-key", multiple=True, help="its key [env API_KEY]; repeated: of tenants that take turns")
@click.option(
    "--workload", "mix", type=click.Choice(("chat", "agent", "document")), multiple=True, help="may be repeated [default chat]"
)
@click.option("--concurrency", type=click.IntRange(min=1), multiple=True, help="closed loop; repeated: a point each")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), multiple=True, help="Poisson arrivals per second")
@click.option("--find-capacity", is_flag=True, help="search the largest rate whose requests keep the targets [ttft=5000]")
@click.option("--overload", type=click.FloatRange(min=0), default=3.0, help="then send so many times as much; 0: do not")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=30.0, help="of each rate of --find-capacity")
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True), help="seconds, sent as X-Request-Timeout-Ms")
@click.option("--trace", type=_FILE, help="file of requests with their times, as docs/bench.md has it")
@click.option("--requests", type=click.IntRange(min=1), default=32, show_default=True, help="of each point")
@click.option("--scale", type=click.FloatRange(min=0, min_open=True), default=1.0, help="of the workload's lengths")
@click.option("--input-len", type=click.IntRange(min=1), help="tokens of every prompt, about, and nothing shared")
@click.option("--output-len", type=click.IntRange(min=1), help="tokens of every answer")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0: greedy")
@click.option("--ignore-eos", is_flag=True, help="send ignore_eos and min_tokens, which not all servers know")
@click.option("--target", multiple=True, help="ttft=MS, tpot=MS or e2e=MS for goodput; the workload's if not given")
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="short requests before")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=600.0, help="seconds for one request")
@click.option("--seed", type=int, default=1)
@click.option("--output", type=_FILE, help="write JSON")
@click.option("--html", type=_FILE, help="write a page with table and plots")
@click.option("--svg", type=click.Path(path_type=Path, file_okay=False), help="write the plots into this folder")
@click.option("--compare", type=(_FILE, _FILE), help="two results of --output side by side, and nothing else")
def bench(**given: Any) -> int:
    """Measure a running server: latency, throughput, goodput."""
    from headrace_launcher.bench import command
    from headrace_launcher.bench.capacity import TARGETS, Traffic
    from headrace_launcher.bench.load import Load

    if given["compare"]:
        return command.run_compare(*given["compare"])
    if sum(bool(given[name]) for name in ("rate", "concurrency", "trace")) > 1:
        raise click.UsageError("give one of --rate, --concurrency and --trace")
    try:
        targets = command.parse_targets(given["target"])
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    keys = given["api_key"] or ((os.environ["API_KEY"],) if os.environ.get("API_KEY") else ())
    load = Load(
        given["url"] or f"http://127.0.0.1:{os.environ.get('PORT') or 3000}", command.APIS[given["api"]],
        temperature=given["temperature"], ignore_eos=given["ignore_eos"],
        api_keys=keys, timeout=given["timeout"], seed=given["seed"],
    )
    files = given["output"], given["html"], given["svg"]
    if given["find_capacity"]:
        if given["concurrency"] or given["trace"] or len(given["rate"]) > 1:
            raise click.UsageError("--find-capacity takes one --rate to begin with, no --concurrency and no --trace")
        traffic = Traffic(
            given["mix"] or ("chat",), given["scale"], given["input_len"], given["output_len"], given["seconds"],
            targets or TARGETS, given["deadline"], given["seed"],
        )
        first = given["rate"][0] if given["rate"] else None
        return command.run_capacity(traffic, load, first, given["overload"], *files, model=given["model"])
    concurrency = given["concurrency"] or (() if given["rate"] or given["trace"] else (1,))
    plan = command.Plan(
        given["rate"], concurrency, given["trace"], given["mix"] or ("chat",), given["requests"], given["scale"],
        given["input_len"], given["output_len"], given["seed"], given["warmup"], targets, max(len(keys), 1),
        given["deadline"],
    )
    return command.run(plan, load, *files, model=given["model"])


@headrace.group("worker-token")
@click.option("--worker-token-file", required=True, help="as the gateway has it")
@click.pass_context
def worker_token(context: click.Context, worker_token_file: str) -> None:
    """Tokens of a gateway's workers."""
    from headrace_router.network.tokens import WorkerTokens

    context.obj = WorkerTokens(worker_token_file)


@worker_token.command()
@click.option("--name", default="", help="whose it is")
@click.option(
    "--tier", type=click.Choice(("trusted", "owner", "open")), default="trusted", show_default=True,
    help="how far its holder is trusted: requests name the least tier that may run them",
)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="until it expires; never if not given")
@click.option("--slots", type=click.IntRange(min=1), help="most requests at once that its holder gets")
@click.option("--model", "models", multiple=True, help="that its holder may serve; may be repeated, all if not given")
@click.pass_obj
def create(tokens: Any, name: str, tier: str, days: float | None, slots: int | None, models: tuple[str, ...]) -> int:
    """Make a token and show it, this once."""
    expires = None if days is None else int(time.time() + days * 86_400)
    click.echo(tokens.create(name, tier, expires, slots, models))
    return 0


@worker_token.command("list")
@click.pass_obj
def list_tokens(tokens: Any) -> int:
    """Show the tokens' ids, state, tiers, terms and names."""
    for row in tokens.rows:
        state = "valid" if row.lapse is None else row.lapse.split()[-1]
        until = f"until {time.strftime('%Y-%m-%d', time.gmtime(row.expires))}" if row.expires else ""
        slots = f"{row.slots} slots" if row.slots else ""
        terms = ", ".join(part for part in (until, slots, *row.models) if part)
        click.echo(f"{row.id}  {state:7}  {row.tier:7}  {row.name}{f'  ({terms})' if terms else ''}")
    return 0


@worker_token.command()
@click.argument("token_id")
@click.pass_obj
def revoke(tokens: Any, token_id: str) -> int:
    """Cut off the worker with this token, at once."""
    from headrace._common.errors import NotFound

    try:
        tokens.revoke(token_id)
    except NotFound as error:
        click.echo(f"error: {error}", err=True)
        return 1
    return 0


headrace.add_command(serve_command)
headrace.add_command(worker_command)
headrace.add_command(shard_command)


def main() -> None:
    """Entry point of `headrace`."""
    sys.exit(options.run(headrace, prog_name="headrace"))


def launcher_main() -> None:
    """Entry point of `headrace-launcher` and `python -m headrace_launcher`."""
    sys.exit(options.run(serve_command, prog_name="headrace-launcher"))
