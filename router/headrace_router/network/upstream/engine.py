"""Jobs of text at another server: one HTTP request each, its SSE stream as tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from headrace._common.errors import GenerationFailed, HeadraceError, Overloaded
from headrace_router.network.frames import JobFrame
from headrace_router.network.text_output import LONGEST_TEXT
from headrace_router.network.upstream.apis import UNKNOWN, Api, end_of
from headrace_router.streams import TokenStream
from headrace_router.types import Token

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
LAST_SECONDS = 2.0  # from the last token to the end of the stream
AGAIN_SECONDS = 1.0  # between looks at a server that was lost
LARGEST_LINE = 1 << 20  # bytes
_STRANGE = (KeyError, TypeError, ValueError, AttributeError, IndexError)


class UpstreamEngine:
    """Runs jobs at a server. `available` is False from a lost connection until it answers again."""

    def __init__(self, client: aiohttp.ClientSession, url: str, api: Api) -> None:
        """`client`: with the server's key, if it has one, and without limits of time."""
        self._client, self._url, self._api = client, url, api
        self._tasks: set[asyncio.Task[None]] = set()
        self.available = True

    def submit(self, job: JobFrame) -> TokenStream:
        """Ask for a job's text. Closing the stream closes the connection, which ends the server's work on it."""

        def cancel() -> None:
            task.cancel()

        stream = TokenStream(cancel)
        task = asyncio.create_task(self._run(job, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _run(self, job: JobFrame, stream: TokenStream) -> None:
        try:
            await self._read(job, stream)
            error: HeadraceError = GenerationFailed("the upstream's stream ended before its output did")
        except HeadraceError as failure:
            error = failure
        except _STRANGE as strange:
            error = GenerationFailed(f"the upstream's answer is not of its API: {type(strange).__name__} {strange}"[:300])
        except (aiohttp.ClientError, OSError, TimeoutError) as lost:
            if isinstance(lost, aiohttp.ClientConnectionError) and self.available:
                log.warning("the upstream is lost: %s", lost)
                self.available = False
            error = GenerationFailed(f"the upstream was lost: {lost or type(lost).__name__}")
        if not stream.done:  # else it is about what came after the output
            stream.fail(error)

    async def _read(self, job: JobFrame, stream: TokenStream) -> None:
        headers = {"X-Request-Id": job.job, "Accept": "text/event-stream", **({"traceparent": job.trace} if job.trace else {})}
        async with self._client.post(self._url + self._api.path, json=self._api.body(job), headers=headers) as response:
            if response.status in (429, 503):
                raise Overloaded(f"the upstream answers {response.status}")
            if response.status != 200:
                text = (await response.content.read(2000)).decode("utf-8", "replace")
                raise GenerationFailed(f"the upstream answers {response.status}: {text[:300]}")
            told, left = events(response), job.params.max_new_tokens
            async for event in told:
                for token in self._api.read(event):
                    _check(token)
                    left -= bool(token.text or token.id >= 0)
                    if left < 0:  # it has not counted
                        token = Token(UNKNOWN, math.nan, "", False, end=end_of("length"))
                    stream.put(token)
                    if stream.done:
                        break
                if stream.done:
                    break
            with contextlib.suppress(TimeoutError):  # what it says beside the output; then the connection can be used again
                async with asyncio.timeout(LAST_SECONDS):
                    async for _ in told:
                        pass

    async def watch(self) -> None:
        """Ask a server that was lost again and again; never returns."""
        while True:
            await asyncio.sleep(AGAIN_SECONDS)
            if not self.available:
                self.available = await self._answers()

    async def _answers(self) -> bool:
        try:
            async with self._client.get(self._url + "/health", timeout=aiohttp.ClientTimeout(total=CONNECT_SECONDS)) as reply:
                return reply.status < 500
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


def _check(token: Token) -> None:
    """Make a token of what a server has told one that can be sent on.

    Raises:
        TypeError: a member is of another type.
        ValueError: its text is longer than any token's.
    """
    if not isinstance(token.id, int) or not isinstance(token.logprob, int | float) or not isinstance(token.text, str):
        raise TypeError("a token's id, log probability or text is of another type")
    if len(token.text) > LONGEST_TEXT:
        raise ValueError(f"a token of {len(token.text)} characters")
    if not token.text.isascii():
        token.text = token.text.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of an SSE stream (https://html.spec.whatwg.org/multipage/server-sent-events.html), up to [DONE].

    A field `error`, in which llama.cpp tells errors, is an event too. Ids, names and comments are passed over.

    Raises:
        GenerationFailed: a line is longer than any token can be.
        ValueError: the data is not JSON.
    """
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LARGEST_LINE:
            raise GenerationFailed("the upstream sends a line without end")
        for line in lines:
            name, _, value = line.rstrip(b"\r").partition(b":")
            if name == b"error":
                yield {"error": json.loads(value)}
            elif name == b"data":
                if value.strip() == b"[DONE]":
                    return
                yield json.loads(value)
