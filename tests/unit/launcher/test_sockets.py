"""Addresses are checked before anything heavy starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from headrace._common.errors import StartupError
from headrace_launcher import sockets


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartupError, match=rf"--port {port}.*in use"):
            sockets.check_port("127.0.0.1", port, "--port")
    assert sockets.check_port("127.0.0.1", port, "--port") == port


def test_port_zero_becomes_a_free_port() -> None:
    assert sockets.check_port("127.0.0.1", 0, "--port") > 0


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(StartupError, match=host):
        sockets.check_port(host, 0, "--port")


def test_a_dead_socket_is_removed_and_a_living_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s-0")
        server.listen(1)
        with pytest.raises(StartupError, match="another process listens"):
            sockets.prepare_prefix(str(tmp_path / "s"), 1)
    assert sockets.prepare_prefix(str(tmp_path / "s"), 1) == [tmp_path / "s-0"]
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_is_kept(tmp_path: Path) -> None:
    (tmp_path / "s-0").touch()
    with pytest.raises(StartupError, match="not a socket"):
        sockets.prepare_prefix(str(tmp_path / "s"), 1)


def test_long_paths_and_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="107"):
        sockets.prepare_prefix(str(tmp_path / ("x" * 120)), 1)
    with pytest.raises(StartupError, match="does not exist"):
        sockets.prepare_prefix("/no/such/s", 1)


def test_urls() -> None:
    assert sockets.url("127.0.0.1", 1) == "http://127.0.0.1:1"
    assert sockets.url("::1", 1) == "http://[::1]:1"
    assert sockets.reachable("0.0.0.0") == "127.0.0.1"
    assert sockets.is_loopback("127.0.0.2")
    assert not sockets.is_loopback("0.0.0.0")
