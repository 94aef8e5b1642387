from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.brokers import KINDS, Brokers, Valkey


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.stop()


@pytest.fixture(params=KINDS)
def brokers(request: pytest.FixtureRequest, valkey: Valkey) -> Iterator[Brokers]:
    made = Brokers(request.param, valkey.url)
    yield made
    made.close()
