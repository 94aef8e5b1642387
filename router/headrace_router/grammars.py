"""Grammars are compiled here once, to refuse the bad ones before a shard sees them.

On a thread of its own, over single bytes instead of the model's tokens: that costs no memory, and finds the same faults.
llguidance releases the GIL, and what it may spend is bounded, so that no stream waits for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import llguidance

from headrace._common.errors import Overloaded
from headrace._common.grammars import Grammar, GrammarError, compile_grammar, refusal
from headrace._common.memory import trim_memory

KEPT = 512  # grammars whose outcome is remembered
WAIT_SECONDS = 10.0  # longest wait for the outcome, the work on others' grammars included
STEPS = 64  # bytes of an output that are tried
LARGE = 8192  # characters; compiling a grammar of more leaves much free memory behind


class GrammarChecker:
    """Says of each grammar whether it can be used."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar", initializer=_yield_to_others)
        self._tokenizer = llguidance.LLTokenizer("byte")
        self._outcomes: OrderedDict[Grammar, asyncio.Future[GrammarError | None]] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """
        Raises:
            GrammarError: the grammar is wrong, asks for what cannot be enforced, or is too large.
            Overloaded: too many grammars wait to be compiled.
        """
        outcome = self._outcomes.get(grammar)
        if outcome is None:
            loop = asyncio.get_running_loop()
            outcome = self._outcomes[grammar] = loop.run_in_executor(self._thread, self._compile, grammar)
            while len(self._outcomes) > KEPT:
                self._outcomes.popitem(last=False)
        self._outcomes.move_to_end(grammar)
        try:
            # A client that goes away leaves the work to those who ask for the same.
            error = await asyncio.wait_for(asyncio.shield(outcome), WAIT_SECONDS)
        except TimeoutError:
            raise Overloaded("too many grammars are being compiled") from None
        if error is not None:
            raise GrammarError(str(error), error.field)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> GrammarError | None:
        try:
            self._try(grammar)
        except GrammarError as error:
            return error
        finally:
            if len(grammar.source) > LARGE:
                trim_memory()
        return None

    def _try(self, grammar: Grammar) -> None:
        """Compile a grammar, and go some steps along one of its outputs: some explode only there.

        Raises:
            GrammarError: it does not get that far.
        """
        matcher = compile_grammar(grammar, self._tokenizer)
        for step in range(STEPS):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error():
                raise refusal(grammar, matcher.get_error())
            allowed = [byte for byte in range(256) if mask >> byte & 1]
            if not allowed:
                return
            matcher.consume_token(allowed[step % len(allowed)])


def _yield_to_others() -> None:
    """Compiling must not take a core from the shards' threads."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
