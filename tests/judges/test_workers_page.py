"""The page of a gateway's workers in Debian's Chromium: what the JSON has is what it shows."""

from __future__ import annotations

import asyncio
import re
import shutil
from html import unescape
from pathlib import Path

import pytest

from tests.fakes.network import network
from tests.fakes.routers import until

pytestmark = pytest.mark.judges
CHROMIUM = shutil.which("chromium")


def texts(html: str, pattern: str) -> list[str]:
    return [unescape(re.sub(r"<[^>]*>", "", found)).strip() for found in re.findall(pattern, html, re.S)]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt install chromium)")
async def test_a_browser_shows_who_is_there(tmp_path: Path) -> None:
    async with network(tmp_path / "model") as net:
        worker = await net.scripted(slots=2, format="f32")
        jobs = [(await net.ask()).json["id"] for _ in range(5)]
        await until(lambda: net.gateway.waiting == 3)
        assert CHROMIUM is not None
        flags = (
            "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}", "--timeout=5000",
            "--virtual-time-budget=1500", "--dump-dom",
        )
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM, *flags, f"{net.url}/workers", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(60):
            reading = asyncio.create_task(worker.next("nothing", 60))  # who reads answers pings
            html = (await browser.communicate())[0].decode()
            reading.cancel()
        [shown] = (await net.get("/v1/workers")).json["workers"]
        cards = dict(zip(texts(html, "<dt>(.*?)</dt>"), texts(html, "<dd .*?>(.*?)</dd>"), strict=True))
        assert (cards["workers"], cards["slots in use"], cards["requests waiting"]) == ("1", "2 of 2", "3")
        assert (cards["chat waiting"], cards["agent waiting"]) == ("3", "0")
        [row] = re.findall("<tbody><tr>(.*?)</tr></tbody>", html, re.S)
        assert texts(row, "<t[hd].*?>(.*?)</t[hd]>")[:6] == [
            shown["session"], "test", "scripted, f32", shown["tier"], "working", "2 of 2",
        ]
        for job in jobs:
            assert await net.delete(f"/v1/requests/{job}") == 204
