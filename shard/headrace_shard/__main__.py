"""`python -m headrace_shard`: one shard process."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import click

from headrace._common import logs, options
from headrace._common.errors import StartupError
from headrace._common.process import die_with_parent
from headrace_shard.settings import ShardSettings, conflict


def run(**given: Any) -> int:
    """Serve headrace.v1.Generation for one rank of a shard group."""
    settings = options.collect(ShardSettings, given)
    logs.setup(f"shard {settings.rank}", settings.log_level, settings.json_output)
    log = logging.getLogger(__name__)
    begin = time.perf_counter()
    if not settings.model_folder:
        raise click.UsageError("--model-folder is missing: the folder with config, tokenizer and weights")
    if settings.rank >= settings.num_shard:
        raise click.UsageError(f"--rank {settings.rank} is not below --num-shard {settings.num_shard}")
    if settings.dtype is not None and settings.quantize is not None:
        raise click.UsageError(conflict(settings.dtype, settings.quantize))
    if settings.num_shard > 1 and not settings.shard_uds_path:
        raise click.UsageError(f"--num-shard {settings.num_shard} needs --shard-uds-path, where the ranks find each other")
    # Checked before torch is imported, which takes seconds.
    from headrace_shard.sockets import check_socket, remove_sockets, socket_path

    path = socket_path(settings)
    try:
        check_socket(path)
    except StartupError as error:
        log.error("%s", error)
        return 1

    die_with_parent(lambda: remove_sockets(settings, path))
    # torch's threads sleep between operations: spinning ones cost a busy machine three times the step.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from headrace_shard import server

    return server.run(settings, path, time.perf_counter() - begin)


def main() -> None:
    command = click.Command("headrace-shard", params=options.parameters(ShardSettings), callback=run, help=run.__doc__)
    sys.exit(options.run(command))


if __name__ == "__main__":
    main()
