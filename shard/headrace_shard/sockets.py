"""The unix socket of a rank: where it is, and whether it can be bound. Free of torch, to fail early."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile

from headrace._common.errors import StartupError
from headrace_shard.settings import ShardSettings


def socket_path(settings: ShardSettings) -> str:
    """Where this rank listens; a folder of its own where no prefix is given."""
    prefix = settings.shard_uds_path or os.path.join(tempfile.mkdtemp(prefix="headrace-"), "shard")
    return f"{prefix}-{settings.rank}"


def rendezvous_path(settings: ShardSettings) -> str:
    """Where the ranks of a group meet while they start."""
    return f"{settings.shard_uds_path}-rendezvous"


def remove_sockets(settings: ShardSettings, path: str) -> None:
    """What a process that ends early would leave behind: its socket, and rank 0 the place where the ranks meet."""
    for name in (path, rendezvous_path(settings))[: 2 if settings.rank == 0 else 1]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def check_socket(path: str) -> None:
    """Remove a socket that nobody listens on any more.

    Raises:
        StartupError: the path cannot be used, or a living process listens there.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if len(os.fsencode(path)) > 107:
        raise StartupError(f"the socket path {path} is longer than the system's 107 bytes: choose another --shard-uds-path")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise StartupError(f"cannot create the socket {path}: {folder} is not a folder that this user can write")
    if not os.path.lexists(path):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            try:
                os.unlink(path)
            except OSError as error:
                raise StartupError(f"cannot replace {path}: {error.strerror}") from None
            return
    raise StartupError(f"another process listens on {path}: choose another --shard-uds-path")
