"""Compiles grammars and fills masks, each on threads of its own: no step waits for either longer than it wants to."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import llguidance
import numpy as np

from headrace._common.grammars import Grammar, GrammarError, compile_grammar, refusal
from headrace_shard.grammar.state import Constraint
from headrace_shard.sampling import bits
from headrace_shard.sampling.bits import Bits

TRIED = 512  # tokens that are tried for whether they end an output
KEPT = 64  # grammars that are kept compiled
PATIENCE = 0.010  # seconds that a step waits for masks after a forward pass
MASK_THREADS = 4  # a slow mask holds up only its own row, as long as there are threads for the others
log = logging.getLogger(__name__)


class GrammarCompiler:
    """Makes the `Constraint` of each request, and moves it on."""

    def __init__(self, tokens: llguidance.LLTokenizer, vocab_size: int) -> None:
        """`vocab_size`: of the model, whose logits may be more than the tokenizer has tokens."""
        self._tokens, self._vocab_size = tokens, vocab_size
        self._known: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._compiling = ThreadPoolExecutor(1, "grammar", _yield_to_others, (10,))
        self._moves: deque[Callable[[], None]] = deque()
        self._filling = 0  # threads at work on these; one, unless a step waits: threads side by side fight for the interpreter
        self._turns = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._ready = threading.Condition()
        self._closed = False
        self.on_ready: Callable[[], None] = lambda: None  # called on these threads whenever a late constraint gets ready
        for number in range(MASK_THREADS):
            threading.Thread(target=self._fill_masks, name=f"mask_{number}", daemon=True).start()

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
        self._move(lambda: self._follow(constraint, tokens, last))

    def branch(self, constraint: Constraint) -> None:
        """Forget the draft tokens of a constraint that is ready: others will follow."""
        constraint.branch, constraint.ahead = None, []

    def look(self, constraint: Constraint, drafts: Sequence[int], left: int) -> None:
        """The request, which may get `left` more tokens, has these draft tokens behind those of earlier calls since the
        last `branch`: find what may follow each.
        """
        constraint.busy = True
        self._move(lambda: self._explore(constraint, drafts, left))

    def _move(self, work: Callable[[], None]) -> None:
        self._moves.append(work)
        self._call_threads(1)

    def _call_threads(self, most: int) -> None:
        """Have so many threads at work, if there is that much to do."""
        with self._lock:
            more = min(most - self._filling, len(self._moves))
            if more > 0:
                self._filling += more
                self._turns.release(more)

    def wait(self, constraints: Sequence[Constraint], seconds: float) -> None:
        """Wait until these are ready, no longer than so many seconds; those that are not are late then."""
        if any(c.busy for c in constraints):
            self._call_threads(MASK_THREADS)
        with self._ready:
            if any(c.busy for c in constraints):
                self._ready.wait_for(lambda: not any(c.busy for c in constraints), seconds)
            for constraint in constraints:
                constraint.late = constraint.busy

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._closed = True
        self._turns.release(MASK_THREADS)

    # on the threads

    def _begin(self, constraint: Constraint, output: Sequence[int], last: bool) -> None:
        with self._work(constraint):
            constraint.matcher = self._matcher(constraint.grammar)
            self._go_on(constraint, constraint.matcher, list(output), last)

    def _fill_masks(self) -> None:
        """The life of a thread that fills masks."""
        _yield_to_others(5)
        while self._turns.acquire() and not self._closed:
            while move := self._next():
                move()

    def _next(self) -> Callable[[], None] | None:
        """What a thread at work is to do; None: it sleeps."""
        with self._lock:
            if self._moves:
                return self._moves.popleft()
            self._filling -= 1
            return None

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
        except BaseException:  # a panic of llguidance is one
            log.exception("a grammar could not be followed")
        finally:
            with self._ready:
                constraint.busy, late = False, constraint.late
                self._ready.notify_all()
            if late:
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

    def _ending(self, matcher: llguidance.LLMatcher, mask: Bits) -> Bits:
        """The tokens after which the output is whole; the mask as it is if none is found. Of many only short ones are tried:
        brackets, quotes, digits.
        """
        tried = bits.tokens_of(mask)
        if len(tried) > TRIED:
            tried = np.array([i for i in tried if len(self._tokens.decode_bytes([int(i)])) <= 2], dtype=np.int64)
        ending = bits.none_of(len(mask))
        for token in tried[:TRIED].tolist():
            after = matcher.deep_copy()
            if after.consume_token(token) and after.is_accepting():
                bits.add(ending, token)
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

    def _fill(self, constraint: Constraint, matcher: llguidance.LLMatcher) -> Bits:
        """
        Raises:
            GrammarError: a limit is passed, or the vocabulary has no token that can follow.
        """
        mask = bits.none_of((self._tokens.vocab_size + 31) // 32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise refusal(constraint.grammar, matcher.get_error())
        bits.cut(mask, self._vocab_size)
        if not mask.any():
            raise GrammarError("the vocabulary has no token that can follow", "grammar")
        return mask


def _yield_to_others(niceness: int) -> None:
    """A thread that works for long must not take a core from the forward pass."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
