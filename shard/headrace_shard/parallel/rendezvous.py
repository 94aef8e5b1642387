"""Ranks on one host meet at a unix socket: rank 0 hands each of the others the file descriptor of their shared memory.

The memory has no name in any file system, so that nothing of it can be left behind. The connections stay open: the end
of one tells that its process has ended, however that came about.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from headrace._common.errors import StartupError
from headrace_shard.parallel.group import GroupBroken

HELLO = struct.Struct("=ii")  # rank, world size
HELLO_SECONDS = 5.0
RETRY_SECONDS = 0.02


def host(path: Path, world_size: int, descriptor: int, seconds: float) -> dict[int, socket.socket]:
    """Rank 0: wait for all others and give them the descriptor; returns their connections by rank.

    Raises:
        StartupError: not all came within so many seconds, or they do not fit together; says which.
        GroupBroken: one came and has ended.
    """
    end = time.monotonic() + seconds
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        path.unlink(missing_ok=True)
        try:
            with _reachable(path) as address:
                listener.bind(address)
            path.chmod(0o600)
            listener.listen(world_size)
            while len(peers) < world_size - 1:
                listener.settimeout(max(0.0, end - time.monotonic()))
                peer, _ = listener.accept()
                rank, size = _hello(peer)
                if rank == 0:  # somebody who only looked
                    peer.close()
                    continue
                if size != world_size or rank in peers:
                    raise StartupError(f"rank {rank} of {size} does not fit into the shard group of {world_size} at {path}")
                peers[rank] = peer
        except OSError as error:
            missing = ", ".join(str(rank) for rank in range(1, world_size) if rank not in peers)
            raise StartupError(f"rank 0 of {world_size} did not meet the others, {missing}, at {path}: {error}") from None
        finally:
            path.unlink(missing_ok=True)
    for rank, peer in peers.items():
        try:
            socket.send_fds(peer, [b"\0"], [descriptor])
        except OSError:
            raise GroupBroken(f"rank 0 of {world_size} lost another rank: rank {rank} has ended") from None
    return peers


def join(path: Path, rank: int, world_size: int, seconds: float) -> tuple[int, socket.socket]:
    """Another rank: the descriptor that rank 0 gives, and the connection to it.

    Raises:
        StartupError: rank 0 was not there, or not all others were, within so many seconds.
        GroupBroken: rank 0 has ended.
    """
    leader = _connect(path, time.monotonic() + seconds)
    leader.settimeout(seconds)
    descriptors: list[int] = []
    with contextlib.suppress(ConnectionError):
        try:
            leader.sendall(HELLO.pack(rank, world_size))
            _, descriptors, _, _ = socket.recv_fds(leader, 1, 1)
        except TimeoutError:
            raise StartupError(f"rank {rank} of {world_size} waited {seconds:.0f} s at {path} for the others") from None
    if not descriptors:
        raise GroupBroken(f"rank {rank} of {world_size} lost another rank: rank 0 has ended")
    return descriptors[0], leader


def _connect(path: Path, end: float) -> socket.socket:
    """A connection to rank 0, which may not be there yet; `end`: until when it may come."""
    while True:
        leader = socket.socket(socket.AF_UNIX)
        try:
            with _reachable(path) as address:
                leader.connect(address)
            return leader
        except OSError as error:
            leader.close()
            if time.monotonic() > end:
                raise StartupError(f"rank 0 of the shard group cannot be met at {path}: {error}") from None
            time.sleep(RETRY_SECONDS)


def _hello(peer: socket.socket) -> tuple[int, int]:
    """(rank, world size) of who has connected; rank 0 if it does not say."""
    peer.settimeout(HELLO_SECONDS)
    try:
        said = peer.recv(HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return 0, 0
    return HELLO.unpack(said) if len(said) == HELLO.size else (0, 0)


@contextlib.contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """An address of a unix socket, which may have 107 bytes only, for a path that may be longer."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
