"""Networks of real processes, shared by the tests. A test may leave fewer workers than it found, but some."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from safetensors.numpy import load_file, save_file

from tests.chaos.streams import PATIENCE, Client
from tests.models import TINY, write_tiny_model
from tests.networks import Network

WORKERS = 3
SLOTS = 20  # of each: one can take what all of them had
QUEUE = 32


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose outputs are long: its end token is seldom drawn, and never the likeliest."""
    folder = write_tiny_model(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][TINY["eos_token_id"]] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session", params=["memory://", pytest.param("embedded", marks=pytest.mark.chaos)])
def net(
    long_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Network]:
    """A gateway and three workers on a tiny model."""
    gateway = ("--broker", request.param, "--max-queue-size", str(QUEUE))
    with Network(long_model, tmp_path_factory.mktemp("network"), gateway, ("--slots", str(SLOTS))) as made:
        yield made.start(WORKERS)


@pytest.fixture
async def client(net: Network) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=PATIENCE, connector=connector) as session:
        yield Client(net.url, session)
