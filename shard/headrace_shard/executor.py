"""The executor: one thread that runs step after step.

One step, in order:

1. boundary: take in what clients asked for meanwhile (new calls, Filter, Clear, cancels), end the calls that are
   done, start the ones that waited, hand over the last step's results;
2. plan: decode rows first, then prompt chunks (`scheduler`), or guesses of what follows (`speculation`);
3. forward: one pass of the model over the flat batch of tokens;
4. sample: one token for each row that is complete, unless its grammar is not ready;
5. finish: append the tokens, see which requests have ended.

Nothing outside this thread touches batches, rows or blocks; everything comes in through `post`, and goes out through
`deliver`, once per boundary.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch

from headrace._common.errors import HeadraceError, Unhealthy
from headrace_shard.batch import RunningBatch
from headrace_shard.calls import BatchTable, Call
from headrace_shard.draft import Drafter, DraftModel
from headrace_shard.grammar import steps as grammar_steps
from headrace_shard.grammar.compiler import GrammarCompiler
from headrace_shard.kv.blocks import BlockManager
from headrace_shard.kv.prefix import PrefixCache
from headrace_shard.outcome import Outcome
from headrace_shard.parallel.group import GroupBroken, Trouble
from headrace_shard.requests import StepResult, Timings
from headrace_shard.sampling.passes import Passes, TorchPasses
from headrace_shard.sampling.sampler import Choice, Row, choose, most_likely
from headrace_shard.scheduler import Plan, Scheduler
from headrace_shard.speculation import Speculation
from headrace_shard.step import StepInput

T = TypeVar("T")
Delivery = list[tuple[Call, StepResult | HeadraceError]]
log = logging.getLogger(__name__)


class Runner(Protocol):
    """The model as the executor sees it. `heartbeat`: seconds without a step after which `idle` is due; None: never."""

    heartbeat: float | None

    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits [logit rows, vocab], float32, until the next step.

        Raises:
            GroupBroken: another rank is gone; there will be no further step.
            RuntimeError: this step failed.
        """

    def idle(self) -> None:
        """Exchange a sign of life with the other ranks; raises GroupBroken."""

    def stop(self) -> None:
        """Tell the other ranks that no step follows; raises GroupBroken."""


class Executor:
    """Owns the running batch. Everything but `advance` may be called from any thread."""

    def __init__(
        self, runner: Runner, rows: RunningBatch, blocks: BlockManager, *, eos_ids: frozenset[int], vocab_size: int,
        max_step_tokens: int, batch_lease: float, deliver: Callable[[Delivery], None], step_deadline: float,
        prefix_caching: bool = True, speculate: int = 0, draft: DraftModel | None = None,
        grammars: GrammarCompiler | None = None, passes: Passes | None = None, prompts_differ: bool = False,
    ) -> None:
        """`deliver` is called from the executor's thread; `step_deadline`: seconds after which a step counts as hung;
        `grammars`: None if no request is ever constrained; `prompts_differ`: as in `Backend`.
        """
        self._passes = passes or TorchPasses()
        self._runner, self._rows, self._deliver, self._grammars = runner, rows, deliver, grammars
        if grammars is not None:
            grammars.on_ready = self.wake
        self._prefix = PrefixCache(rows, blocks, prefix_caching, prompts_differ)
        self._table = BatchTable(rows, blocks, self._prefix, batch_lease)
        drafter = Drafter(draft, rows, vocab_size, eos_ids, self._passes, self._sampling_row, grammars) if draft else None
        self._speculation = Speculation(rows, speculate, drafter, grammars)
        self._scheduler = Scheduler(self._table, max_step_tokens, self._speculation)
        self._eos_ids = tuple(sorted(eos_ids))
        self._outcome = Outcome(self._table, self._eos_ids, vocab_size, grammars)
        self._step_deadline = step_deadline
        self._inbox: deque[Callable[[], None]] = deque()
        self._wakeup = threading.Event()
        self._busy_since = math.inf
        self._last_pass = time.monotonic()
        self._trouble: Trouble | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)

    # other threads

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step at work."""
        self._stopping = True
        self._wakeup.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def wake(self) -> None:
        """Look again: a client has read, or a grammar is ready."""
        self._wakeup.set()

    def submit(self, call: Call) -> None:
        """Start a Prefill or Decode at the next boundary."""
        self._post(lambda: self._table.submit(call, time.monotonic()))

    def cancel(self, call: Call) -> None:
        self._post(lambda: self._table.cancel(call, time.monotonic()))

    def filter(self, batch_id: int, owner: str, keep: list[int]) -> Future[int]:
        """At the next boundary; gives the number of requests left."""
        return self._ask(lambda: self._table.filter(batch_id, owner, keep, time.monotonic()))

    def clear(self, batch_id: int, owner: str) -> Future[int]:
        """At the next boundary; gives the number of batches freed."""
        return self._ask(lambda: self._table.clear(batch_id, owner, time.monotonic()))

    def trouble(self) -> Trouble | None:
        """Why the executor is not healthy, or None."""
        if self._trouble or not self._thread.is_alive():
            return self._trouble or Trouble("the executor has ended", "failed")
        seconds = time.monotonic() - self._busy_since
        if seconds > self._step_deadline:
            return Trouble(f"rank 0 is in one step for {seconds:.0f} s", "hung")
        return None

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wakeup.set()

    def _ask(self, action: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except HeadraceError as error:
                future.set_exception(error)

        self._post(run)
        return future

    # the thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._wakeup.clear()
                    if not self.advance():
                        self._wakeup.wait(self._patience())
                        self._keep_alive()
                self._runner.stop()
        except GroupBroken as error:
            if not self._stopping:
                self._give_up(str(error), "lost" if error.lost else "failed")
        except Exception as error:  # a fault of ours: streams must end, and the process be replaced
            log.exception("the executor failed")
            self._give_up(f"the executor failed: {error!r}", "failed")

    def advance(self) -> bool:
        """One turn of the loop; False if there was nothing to do."""
        self._boundary()
        self._busy_since = time.monotonic()  # the draft model runs while a step is planned
        plan = self._scheduler.plan()
        if plan is None:
            self._busy_since = math.inf
            # Planning may have preempted requests; what that ends may let a waiting call start.
            return self._boundary()
        with self._busy():
            self._step(plan)
        return True

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """While this lasts the step deadline counts."""
        self._busy_since = time.monotonic()
        yield
        self._busy_since = math.inf
        self._last_pass = time.monotonic()

    def _patience(self) -> float | None:
        """Seconds that an idle executor may sleep: until a lease ends or a heartbeat is due."""
        now, beat = time.monotonic(), self._runner.heartbeat
        at = min(self._table.next_expiry(), self._last_pass + beat if beat else math.inf)
        return None if at == math.inf else max(0.0, at - now)

    def _keep_alive(self) -> None:
        beat = self._runner.heartbeat
        if beat and time.monotonic() - self._last_pass >= beat:
            with self._busy():
                self._runner.idle()

    def _give_up(self, message: str, kind: Literal["lost", "failed"]) -> None:
        """No step can be run any more: every call ends with the cause, and clients admit their requests elsewhere."""
        self._boundary()
        self._deliver([(b.call, Unhealthy(message)) for b in self._table.at_work() if b.call])
        self._trouble = Trouble(message, kind)

    def _boundary(self) -> bool:
        """Returns whether anything was handed over."""
        now = time.monotonic()
        self._table.settle(now)
        while self._inbox:
            self._inbox.popleft()()
        self._table.start_pending(now)
        self._table.expire(now)
        delivery = self._table.flush()
        if delivery:
            self._deliver(delivery)
        return bool(delivery)

    def _step(self, plan: Plan) -> None:
        begin = time.perf_counter()
        self._table.step += 1
        sampled = begin
        try:
            logits = self._runner.forward(plan.input)
            sampled = time.perf_counter()
            self._score_prompts(plan, logits)
            plan = self._settle_constraints(plan)
            choice = self._choose(plan, logits)
        except RuntimeError as error:  # torch's own: out of memory, a shape that does not fit
            log.exception("step %d failed", self._table.step)
            self._outcome.fail(plan, f"the step failed: {error}")
            return
        end = time.perf_counter()
        right = self._outcome.record(plan, choice)
        for slot, count in right.items():
            self._speculation.learn(slot, plan.drafted(slot), count)
        guessed = self._speculation.guessed
        timings = Timings(
            sampled - begin, end - sampled, 0.0, plan.decode_tokens, plan.prefill_tokens, plan.draft_tokens,
            sum(right.values()), guessed.seconds, guessed.tokens, guessed.right,
        )
        timings.total = guessed.seconds + time.perf_counter() - begin
        self._scheduler.pace.learn(timings)
        for batch in self._table.at_work():
            if batch.call and batch.call.result:
                batch.call.result.timings = timings

    def _choose(self, plan: Plan, logits: torch.Tensor) -> Choice:
        if len(plan.sample_at) < len(logits):
            logits = logits[torch.from_numpy(plan.sample_at)]
        choices = zip(plan.sampled.tolist(), plan.rounds.tolist(), strict=True)
        return choose(logits, [self._sampling_row(slot, drafted) for slot, drafted in choices], self._passes)

    def _settle_constraints(self, plan: Plan) -> Plan:
        """The plan without the rows whose grammar has failed, or is not ready yet."""
        if not self._rows.constraints or self._grammars is None:
            return plan
        plan, failed = grammar_steps.settle(plan, self._rows.constraints, self._grammars)
        for slot, message in failed.items():
            self._outcome.fail_row(slot, message)
        return plan

    def _sampling_row(self, slot: int, drafted: int) -> Row:
        """What the sampler must know to choose the token behind the known ones and so many draft tokens."""
        rows = self._rows
        request = rows.request(slot)
        prompt, known = int(rows.prompt[slot]), int(rows.known[slot]) + drafted
        forbidden = () if known - prompt >= request.min_new else (*self._eos_ids, *request.stop_ids)
        tokens, allowed = rows.tokens[slot], None
        if request.constraint is not None:
            ends = self._eos_ids if request.ignore_eos else ()
            allowed, forbidden = request.constraint.allowed((*forbidden, *ends), drafted), ()
        return Row(request.params, tokens[:prompt], tokens[prompt:known], known - prompt, forbidden, request.top_n, allowed)

    def _score_prompts(self, plan: Plan, logits: torch.Tensor) -> None:
        """Log probabilities of prompt tokens, collected until the first token goes out."""
        for part in plan.scores:
            rows = logits[part.at : part.at + part.count]
            tokens = self._rows.tokens[part.slot, part.start + 1 : part.start + 1 + part.count].astype(np.int64)
            picked = rows.gather(1, torch.from_numpy(tokens).to(rows.device)[:, None])[:, 0]
            log_total = rows.logsumexp(-1)
            self._rows.prompt_scores[part.slot] += (picked - log_total).tolist()
            if count := self._rows.request(part.slot).prompt_top_n:
                self._rows.prompt_top[part.slot] += most_likely(rows, log_total, count)
