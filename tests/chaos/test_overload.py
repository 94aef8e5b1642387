"""Ten times more requests than there is room for: who is refused hears so at once, and who is taken is served."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter

from tests.chaos.conftest import QUEUE, SLOTS
from tests.chaos.streams import Client, until
from tests.networks import Network

REFUSED_WITHIN = 5.0  # seconds, while the machine has hundreds of requests to look at


async def test_ten_times_too_many(net: Network, client: Client) -> None:
    room = len(net.show()["workers"]) * SLOTS + QUEUE
    deepest = 0

    async def watch() -> None:
        nonlocal deepest
        while True:
            deepest = max(deepest, (await asyncio.to_thread(net.show))["queue"])
            await asyncio.sleep(0.01)

    async def one(number: int) -> tuple[int, float, str]:
        begun = time.monotonic()
        status, body, headers = await client.post("/v1/requests", f"Overload {number}", 40)
        if status != 202:
            assert headers["Retry-After"]
        return status, time.monotonic() - begun, json.loads(body).get("id", "")

    watching = asyncio.create_task(watch())
    replies = await asyncio.gather(*(one(number) for number in range(10 * room)))
    found = Counter(status for status, _, _ in replies)
    slowest = max(seconds for status, seconds, _ in replies if status != 202)
    print(f"\n{10 * room} requests at once: {dict(found)}; the last refusal after {slowest:.2f} s; queue at most {deepest}")
    assert set(found) <= {202, 429, 503}
    assert found[202] >= QUEUE
    assert found[429] + found[503] > 5 * room
    assert slowest < REFUSED_WITHIN
    for heard in await asyncio.gather(*(client.follow(job) for status, _, job in replies if status == 202)):
        heard.check()
    watching.cancel()
    assert deepest <= QUEUE
    await until(lambda: net.show()["queue"] == 0 == net.show()["running"])
