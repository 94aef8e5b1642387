"""The whole chain, from the model to a client of a gateway behind which somebody lends a server of his own."""

from __future__ import annotations

from pathlib import Path

from tests.chain import TOKENS, walk


async def test_one_request_is_the_same_at_every_station(embedded_model: Path, tmp_path: Path) -> None:
    journey = await walk(embedded_model, str(embedded_model), tmp_path)
    shard, client = journey.stations[0], journey.stations[-1]
    assert len(client.tokens) == TOKENS
    for station in journey.stations:
        assert station.tokens == client.tokens, station.name
    assert (journey.result["kind"], journey.result["text"]) == ("done", client.text)
    assert client.times[1] < shard.times[-1]  # tokens do not wait for each other on the way
    for name in ("gateway", "worker", "server"):
        assert journey.request in journey.logs[name], name
