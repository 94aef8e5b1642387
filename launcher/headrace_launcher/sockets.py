"""Checks of addresses before anything heavy starts: HTTP port, shard ports, unix sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from headrace._common.errors import StartupError

_LONGEST_UNIX_PATH = 107  # bytes, of sockaddr_un less the closing zero


def check_port(host: str, port: int, flag: str) -> int:
    """Find out whether a TCP port can be listened on; port 0 becomes a free one.

    Raises:
        StartupError: it is taken, or the address is not one of this machine.
    """
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise StartupError(f"--hostname {host} is no address: {error.strerror}") from None
    for family, kind, protocol, _, address in rows:
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
                listener.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise StartupError(f"{flag} {port}: the port is already in use on {host}") from None
                raise StartupError(f"cannot listen on {host} port {port} ({flag}): {error.strerror}") from None
            port = port or int(listener.getsockname()[1])
    return port


def prepare_prefix(prefix: str, ranks: int) -> list[Path]:
    """The unix sockets PREFIX-RANK, with left-over ones of dead processes removed.

    Raises:
        StartupError: the path is too long, its folder is not writable, or somebody listens there.
    """
    paths = [Path(f"{prefix}-{rank}") for rank in range(ranks)]
    for path in paths:
        length = len(os.fsencode(path))
        if length > _LONGEST_UNIX_PATH:
            raise StartupError(
                f"--shard-uds-path: {path} has {length} bytes, a unix socket's path at most {_LONGEST_UNIX_PATH}"
            )
        if not path.parent.is_dir():
            raise StartupError(f"--shard-uds-path: the folder {path.parent} does not exist")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise StartupError(f"--shard-uds-path: the folder {path.parent} is not writable")
        if path.is_socket():
            if _somebody_listens(path):
                raise StartupError(f"--shard-uds-path: another process listens on {path}")
            path.unlink(missing_ok=True)
        elif path.exists():
            raise StartupError(f"--shard-uds-path: {path} exists and is not a socket")
    rendezvous(prefix).unlink(missing_ok=True)
    return paths


def remove(prefix: str, paths: list[Path]) -> None:
    """Remove sockets, and the file at which the ranks meet, that their processes could not remove themselves."""
    for path in (*paths, rendezvous(prefix)):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def rendezvous(prefix: str) -> Path:
    """The file at which the ranks of a group meet; one of an earlier group would mislead them."""
    return Path(f"{prefix}-rendezvous")


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full backlog, or no right to connect: somebody's
            return True
        return True


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def url(host: str, port: int) -> str:
    """The http URL of an address; IPv6 goes in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reachable(host: str) -> str:
    """The address under which this machine itself reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
