"""`python -m headrace_router`: one router process, as the launcher starts it."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import click
import uvloop

from headrace._common import logs, options, process
from headrace._common.errors import StartupError
from headrace_router.router import Router
from headrace_router.settings import RouterSettings


async def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain. Returns the exit status.

    Raises:
        StartupError: it cannot start; the message is what the operator reads.
    """
    router = Router(settings)
    try:
        await router.start()
        signals: list[asyncio.Event] = [asyncio.Event(), asyncio.Event()]

        def signalled() -> None:
            next((event for event in signals if not event.is_set()), signals[-1]).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, signalled)
        failed = asyncio.create_task(router.failed())
        await _first(asyncio.create_task(signals[0].wait()), failed)
        if not failed.done():
            await _first(asyncio.create_task(router.drain()), asyncio.create_task(signals[1].wait()), failed)
        return 1 if failed.done() else 0
    finally:
        await router.stop()


async def _first(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def serve(**given: Any) -> int:
    """Run a router with these flags."""
    settings = options.collect(RouterSettings, given)
    logs.setup("router", settings.log_level, settings.json_output)
    try:
        return uvloop.run(run(settings))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def main() -> int:
    """The command."""
    process.die_with_parent(lambda: None)
    process.allow_open_files()
    command = click.Command(
        "headrace-router", callback=serve, params=options.parameters(RouterSettings),
        help="The router process: HTTP in front of one shard group.",
    )
    return options.run(command, prog_name="headrace-router")


if __name__ == "__main__":
    sys.exit(main())
