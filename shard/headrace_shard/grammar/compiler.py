"""Compiles grammars and fills masks, each on threads of its own: no step waits for either longer than it wants to."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import llguidance
import llguidance.numpy
import numpy as np

from headrace._common.grammars import Grammar, GrammarError, compile_grammar, refusal
from headrace_shard.grammar.state import Constraint, Mask

TRIED = 512  # tokens that are tried for whether they end an output
KEPT = 64  # grammars that are kept compiled
PATIENCE = 0.010  # seconds that a step waits for masks after a forward pass
MASK_THREADS = 4  # a slow mask holds up only its own row, as long as there are threads for the others


class GrammarCompiler:
    """Makes the `Constraint` of each request, and moves it on."""

    def __init__(self, tokens: llguidance.LLTokenizer, vocab_size: int) -> None:
        """`vocab_size`: of the model, whose logits may be more than the tokenizer has tokens."""
        self._tokens, self._vocab_size = tokens, vocab_size
        self._known: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._compiling = ThreadPoolExecutor(1, "grammar", _yield_to_others, (10,))
        self._filling = ThreadPoolExecutor(MASK_THREADS, "mask", _yield_to_others, (5,))
        self._ready = threading.Condition()
        self.on_ready: Callable[[], None] = lambda: None  # called on these threads whenever a constraint gets ready

    def start(self, grammar: Grammar, output: Sequence[int], last: bool = False) -> Constraint:
        """The constraint of a request that has said `output` already; it gets ready by itself. `last`: it gets one more
        token.
        """
        constraint = Constraint(grammar)
        self._compiling.submit(self._begin, constraint, output, last)
        return constraint

    def advance(self, constraint: Constraint, tokens: Sequence[int], last: bool = False) -> None:
        """The request has got these tokens: find what may follow."""
        constraint.busy = True
        self._filling.submit(self._follow, constraint, tokens, last)

    def branch(self, constraint: Constraint) -> None:
        """Forget the draft tokens of a constraint that is ready: others will follow."""
        constraint.branch, constraint.ahead = None, []

    def look(self, constraint: Constraint, drafts: Sequence[int], left: int) -> None:
        """The request, which may get `left` more tokens, has these draft tokens behind those of earlier calls since the
        last `branch`: find what may follow each.
        """
        constraint.busy = True
        self._filling.submit(self._explore, constraint, drafts, left)

    def wait(self, constraints: Sequence[Constraint], seconds: float) -> None:
        """Wait until these are ready, no longer than so many seconds."""
        if any(c.busy for c in constraints):
            with self._ready:
                self._ready.wait_for(lambda: not any(c.busy for c in constraints), seconds)

    def close(self) -> None:
        for pool in (self._compiling, self._filling):
            pool.shutdown(wait=False, cancel_futures=True)

    # on the threads

    def _begin(self, constraint: Constraint, output: Sequence[int], last: bool) -> None:
        with self._work(constraint):
            constraint.matcher = self._matcher(constraint.grammar)
            self._go_on(constraint, constraint.matcher, list(output), last)

    def _follow(self, constraint: Constraint, tokens: Sequence[int], last: bool) -> None:
        with self._work(constraint):
            assert constraint.matcher is not None
            self._go_on(constraint, constraint.matcher, list(tokens), last)

    def _explore(self, constraint: Constraint, drafts: Sequence[int], left: int) -> None:
        with self._work(constraint), contextlib.suppress(GrammarError):  # that is for tokens that count
            if constraint.branch is None:
                assert constraint.matcher is not None
                constraint.branch = constraint.matcher.deep_copy()
            for token in drafts:
                if constraint.branch.is_stopped() or not constraint.branch.try_consume_tokens([token]):
                    return
                if constraint.branch.is_stopped():
                    return
                mask, last = self._fill(constraint, constraint.branch), left - len(constraint.ahead) == 2
                constraint.ahead.append(self._ending(constraint.branch, mask) if last else mask)

    @contextlib.contextmanager
    def _work(self, constraint: Constraint) -> Iterator[None]:
        """Whatever happens within, the constraint is ready afterwards, or has an error."""
        constraint.error = "the grammar could not be followed"
        try:
            yield
            constraint.error = None
        except GrammarError as error:
            constraint.error = f"grammar: {error}"
        finally:
            with self._ready:
                constraint.busy = False
                self._ready.notify_all()
            self.on_ready()

    def _go_on(self, constraint: Constraint, matcher: llguidance.LLMatcher, tokens: list[int], last: bool) -> None:
        """
        Raises:
            GrammarError: these tokens cannot follow, or nothing can follow them.
        """
        if not matcher.consume_tokens(tokens):
            raise refusal(constraint.grammar, matcher.get_error())
        mask = self._fill(constraint, matcher)
        constraint.mask = self._ending(matcher, mask) if last else mask

    def _ending(self, matcher: llguidance.LLMatcher, mask: Mask) -> Mask:
        """The tokens after which the output is whole; the mask as it is if none is found. Of many only short ones are tried:
        brackets, quotes, digits.
        """
        tried = np.flatnonzero(mask)
        if len(tried) > TRIED:
            tried = np.array([i for i in tried if len(self._tokens.decode_bytes([int(i)])) <= 2], dtype=np.int64)
        ending = np.zeros_like(mask)
        for token in tried[:TRIED].tolist():
            after = matcher.deep_copy()
            ending[token] = after.consume_token(token) and after.is_accepting()
        return ending if ending.any() else mask

    def _matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher at the beginning of the grammar."""
        known = self._known.get(grammar)
        if known is None:
            known = self._known[grammar] = compile_grammar(grammar, self._tokens)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(grammar)
        return known.deep_copy()

    def _fill(self, constraint: Constraint, matcher: llguidance.LLMatcher) -> Mask:
        """
        Raises:
            GrammarError: a limit is passed, or the vocabulary has no token that can follow.
        """
        bits = np.zeros((1, (self._tokens.vocab_size + 31) // 32), dtype=np.int32)
        llguidance.numpy.fill_next_token_bitmask(matcher, bits)
        if matcher.is_error():
            raise refusal(constraint.grammar, matcher.get_error())
        mask = np.unpackbits(bits.view(np.uint8)[0], count=self._vocab_size, bitorder="little").view(np.bool_)
        if not mask.any():
            raise GrammarError("the vocabulary has no token that can follow", "grammar")
        return mask


def _yield_to_others(niceness: int) -> None:
    """A thread that works for long must not take a core from the forward pass."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
