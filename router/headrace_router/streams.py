"""The unbounded queue between the engine and the reader of one request.

Its length is bounded by the request's own token limit, so that a slow reader costs memory, never somebody else's
latency.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import TracebackType

from headrace._common.errors import HeadraceError
from headrace_router.types import Token


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class TokenStream:
    """Tokens of one request, written by the engine and read by one task. Leaving its `async with` cancels the rest.

    Attributes:
        count: tokens that were put.
        done: the terminal event has been written.
        cached_tokens, queue_seconds: from the first token on: of the prompt, and from submission to admission, if the engine
            tells that.
        placed: time.perf_counter() at which it got a place; None: it waits for one.
    """

    __slots__ = (
        "_arrived", "_closed", "_error", "_on_cancel", "_on_close", "_tokens", "cached_tokens", "count", "done",
        "placed", "queue_seconds",
    )

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._on_cancel = on_cancel
        self._tokens: list[Token] = []
        self._error: HeadraceError | None = None
        self._arrived: Callable[[], None] | None = None
        self._closed = False
        self._on_close: Callable[[], None] | None = None
        self.count = 0
        self.done = False
        self.cached_tokens, self.queue_seconds = 0, 0.0
        self.placed: float | None = None

    def put(self, token: Token) -> None:
        """Write a token; one with an `end` is the terminal event."""
        tokens = self._tokens
        tokens.append(token)
        self.count += 1
        if token.end is not None:
            self.done = True
        if self._arrived is not None and len(tokens) == 1:
            self._arrived()

    def fail(self, error: HeadraceError) -> None:
        """Write an error as the terminal event."""
        self._error = error
        self.done = True
        if self._arrived is not None:
            self._arrived()

    def abort(self, error: HeadraceError) -> None:
        """End the request from this side with an error, unless it has ended."""
        if not self.done:
            self.done = True
            self._on_cancel()
            self.fail(error)

    def on_close(self, call: Callable[[], None]) -> None:
        """Have `call` called once, when the reader leaves."""
        self._on_close = call

    def on_arrival(self, call: Callable[[], None]) -> None:
        """Have `call` called whenever there is something to take that was not there before; at once if there is already."""
        self._arrived = call
        if self._tokens or self._error is not None:
            call()

    def take(self) -> list[Token]:
        """All tokens that are there; may be [].

        Raises:
            HeadraceError: the request failed, and all tokens before that have been taken.
        """
        if self._tokens:
            tokens, self._tokens = self._tokens, []
            if self._error is not None and self._arrived is not None:
                self._arrived()
            return tokens
        if self._error is not None:
            raise self._error
        return []

    async def read(self) -> list[Token]:
        """All tokens that are there, waiting for at least one.

        Raises:
            HeadraceError: as `take` does.
        """
        if not self._tokens and self._error is None:
            waiter = asyncio.get_running_loop().create_future()
            self._arrived = partial(_wake, waiter)
            try:
                await waiter
            finally:
                self._arrived = None
        return self.take()

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Every token up to the last; raises what `read` raises."""
        while True:
            for token in await self.read():
                yield token
                if token.end is not None:
                    return

    def close(self) -> None:
        """Cancel what has not ended. Idempotent."""
        if not self._closed:
            self._closed = True
            if not self.done:
                self.done = True
                self._on_cancel()
            if self._on_close is not None:
                self._on_close()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
