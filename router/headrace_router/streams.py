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


class Silence:
    """Calls back when a wait has lasted too long. One timer serves many waits, most of which end before it: it is not
    set and cancelled for every token.
    """

    __slots__ = ("_call", "_deadline", "_timer")

    def __init__(self) -> None:
        self._call: Callable[[], None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, call: Callable[[], None], seconds: float) -> None:
        """A wait begins: have `call` called, once, if it has not ended in so many seconds."""
        loop = asyncio.get_running_loop()
        self._call, self._deadline = call, loop.time() + seconds
        if self._timer is None:
            self._timer = loop.call_at(self._deadline, self._ring)

    def look_away(self) -> None:
        """The wait has ended."""
        self._call = None

    def close(self) -> None:
        """No wait will follow."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if self._call is not None and loop.time() >= self._deadline:
            call, self._call = self._call, None
            call()
        elif self._call is not None:
            self._timer = loop.call_at(self._deadline, self._ring)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class TokenStream:
    """Tokens of one request, written by the engine and read by one task. Leaving its `async with` cancels the rest."""

    __slots__ = ("_arrived", "_closed", "_error", "_on_cancel", "_on_close", "_silence", "_tokens", "count", "done")

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._on_cancel = on_cancel
        self._tokens: list[Token] = []
        self._error: HeadraceError | None = None
        self._arrived: Callable[[], None] | None = None
        self._silence = Silence()
        self._closed = False
        self._on_close: Callable[[], None] | None = None
        self.count = 0  # tokens that were put
        self.done = False  # the terminal event has been written

    def put(self, token: Token) -> None:
        """Write a token; one with an `end` is the terminal event."""
        self._tokens.append(token)
        self.count += 1
        if token.end is not None:
            self.done = True
        if self._arrived is not None:
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
        """Have `call` called whenever there is something to take; at once if there is already."""
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

    async def read(self, seconds: float | None = None) -> list[Token]:
        """All tokens that are there, waiting for at least one; [] if none came within `seconds`.

        Raises:
            HeadraceError: as `take` does.
        """
        if not self._tokens and self._error is None:
            waiter = asyncio.get_running_loop().create_future()
            self._arrived = partial(_wake, waiter)
            if seconds is not None:
                self._silence.watch(self._arrived, seconds)
            try:
                await waiter
            finally:
                self._arrived = None
                self._silence.look_away()
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
            self._silence.close()
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
