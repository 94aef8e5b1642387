"""The executor without its thread, over a stand-in model whose next token is a function of all tokens before it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace._common.errors import AlreadyExists, HeadraceError, InvalidRequest, NotFound, Overloaded, Unhealthy
from headrace_shard.batch import RunningBatch
from headrace_shard.calls import UNREAD_LIMIT, Call
from headrace_shard.draft import DraftModel
from headrace_shard.executor import Delivery, Executor
from headrace_shard.kv.blocks import BLOCK_SIZE, BlockManager
from headrace_shard.requests import (
    CANCELLED,
    EOS_TOKEN,
    ERROR,
    FINISHED,
    LENGTH,
    MAX_STEPS,
    RUNNING,
    STOP_TOKEN,
    YIELDED,
    Request,
    StepResult,
)
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.step import StepInput

VOCAB, EOS, POISON = 50, 2, 49
PROMPT = 100


def follows(tokens: list[int]) -> int:
    """The token that the stand-in model says after these; never the end token."""
    return 3 + hashlib.sha256(bytes(tokens)).digest()[0] % 40


class MemoryModel:
    """Keeps token ids where a model keeps K and V, so that a wrong slot or a lost block gives a wrong token."""

    heartbeat: float | None = None
    vocab_size = VOCAB

    def __init__(self, blocks: int) -> None:
        self.cache = np.full((blocks + 1) * BLOCK_SIZE, -1, dtype=np.int64)
        self.fails = False
        self.says = follows
        self.sizes: list[int] = []

    def forward(self, step: StepInput) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("out of memory")
        contexts = self.contexts(step)
        logits = torch.zeros(len(step.logit_rows), VOCAB)
        for at, row in enumerate(step.logit_rows.tolist()):
            if POISON in contexts[row]:
                logits[at] = torch.nan
            else:
                logits[at, self.says(contexts[row])] = 10.0
        return logits

    def contexts(self, step: StepInput) -> dict[int, list[int]]:
        """What each row of the step sees, itself included."""
        self.sizes.append(len(step.token_ids))
        self.cache[step.slots] = step.token_ids
        contexts = {}
        for row, length in enumerate(step.decode_lengths.tolist()):
            contexts[row] = self._read(step.decode_tables[row], length)
        for chunk in step.chunks:
            for i in range(chunk.length):
                contexts[chunk.offset + i] = self._read(chunk.table, chunk.start + i + 1)
        return contexts

    def idle(self) -> None:
        raise AssertionError("no heartbeat was asked for")

    def stop(self) -> None:
        pass

    def _read(self, table: np.ndarray, length: int) -> list[int]:
        places = (table[:, None].astype(np.int64) * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[:length]
        tokens: list[int] = self.cache[places].tolist()
        return tokens


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(follows(tokens))
    return tokens[len(prompt) :]


def request(number: int, prompt: list[int], max_new: int, **more: object) -> Request:
    return Request(number, np.array(prompt, dtype=np.int32), 0, max_new, **more)  # type: ignore[arg-type]


class TwoKinds(MemoryModel):
    """Computes prompts otherwise than generated tokens: what it keeps, and looks at, of a prompt's token is PROMPT more."""

    def contexts(self, step: StepInput) -> dict[int, list[int]]:
        tokens = step.token_ids.copy()
        tokens[len(tokens) - step.prompts :] += PROMPT
        return super().contexts(replace(step, token_ids=tokens))


def expected_of_two_kinds(prompt: list[int], count: int) -> list[int]:
    return expected([token + PROMPT for token in prompt], count)


class Driver:
    """An executor, and what its calls have handed over."""

    def __init__(
        self, blocks: int = 40, rows: int = 8, step_tokens: int = 16, lease: float = 60.0, speculate: int = 0,
        draft: DraftModel | None = None, prompts_differ: bool = False,
    ) -> None:
        self.model, self.blocks = (TwoKinds if prompts_differ else MemoryModel)(blocks), BlockManager(blocks)
        self.rows = RunningBatch(rows, 128)
        self.out: dict[Call, list[StepResult]] = defaultdict(list)
        self.errors: dict[Call, HeadraceError] = {}
        self.reads = True
        self.executor = Executor(
            self.model, self.rows, self.blocks, eos_ids=frozenset({EOS}), vocab_size=VOCAB, max_step_tokens=step_tokens,
            batch_lease=lease, deliver=self.deliver, step_deadline=10, speculate=speculate, draft=draft,
            prompts_differ=prompts_differ,
        )

    def deliver(self, delivery: Delivery) -> None:
        for call, item in delivery:
            if isinstance(item, HeadraceError):
                self.errors[call] = item
            else:
                self.out[call].append(item)
                call.delivered += self.reads

    def prefill(self, *requests: Request, batch: int = 0, owner: str = "", **more: int) -> Call:
        call = Call(owner, (batch,), tuple(requests), **more)  # type: ignore[arg-type]
        self.executor.submit(call)
        return call

    def decode(self, *batches: int, owner: str = "", steps: int = 0) -> Call:
        call = Call(owner, batches, max_steps=steps)
        self.executor.submit(call)
        return call

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.executor.advance()

    def run(self) -> None:
        for _ in range(5000):
            if not self.executor.advance():
                return
        raise AssertionError("the executor does not come to rest")

    def tokens(self, *calls: Call) -> dict[int, list[int]]:
        got: dict[int, list[int]] = defaultdict(list)
        for call in calls:
            for step in self.out[call]:
                for number, token in zip(step.request_ids, step.token_ids, strict=True):
                    got[number].append(token)
        return got

    def end(self, call: Call) -> int:
        ends = [step.end for step in self.out[call]]
        assert all(e == RUNNING for e in ends[:-1])
        return ends[-1] if ends else RUNNING

    def batch_id(self, call: Call) -> int:
        return self.out[call][0].batch_id


def test_prefill_ends_with_the_first_token_and_decode_goes_on() -> None:
    d = Driver()
    first = d.prefill(request(1, [5] * 20, 4), request(2, [6], 3))
    d.run()
    assert d.end(first) == FINISHED
    assert d.tokens(first)[1] == expected([5] * 20, 1)  # two chunks of the prompt, while request 2 decodes
    rest = d.decode(d.batch_id(first))
    d.run()
    assert d.end(rest) == FINISHED
    assert d.tokens(first, rest) == {1: expected([5] * 20, 4), 2: expected([6], 3)}
    assert d.blocks.free == 40
    assert d.rows.free == 8


def test_ends_come_with_a_detail_and_the_last_token() -> None:
    d = Driver()
    stop = expected([7], 3)[2]
    call = d.prefill(request(1, [7], 9, stop_ids=frozenset({stop})), request(2, [8], 1))
    follow = d.decode(1)
    d.run()
    details = {x.request_id: x for c in (call, follow) for s in d.out[c] for x in s.details}
    assert (details[1].finish_reason, details[1].generated_tokens) == (STOP_TOKEN, 3)
    assert (details[2].finish_reason, details[2].generated_tokens, details[2].prompt_tokens) == (LENGTH, 1, 1)


def test_the_end_token_ends_and_may_be_forbidden_or_ignored() -> None:
    d = Driver()
    bias = SamplingParams(logit_bias={EOS: 100.0})
    call = d.prefill(
        request(1, [7], 5, params=bias), request(2, [7], 5, params=bias, ignore_eos=True),
        request(3, [7], 5, params=bias, min_new=2),
    )
    follow = d.decode(1)
    d.run()
    got = d.tokens(call, follow)
    assert got[1] == [EOS]
    assert got[2] == [EOS] * 5
    assert len(got[3]) == 3
    assert EOS not in got[3][:2]
    reasons = {x.request_id: x.finish_reason for c in (call, follow) for s in d.out[c] for x in s.details}
    assert reasons == {1: EOS_TOKEN, 2: LENGTH, 3: EOS_TOKEN}


def test_a_newer_call_takes_over_after_one_step_and_unfinished_prompts_go_on() -> None:
    d = Driver(step_tokens=4)
    first = d.prefill(request(1, [5] * 30, 3))
    second = d.decode(1)
    d.turn(3)
    assert d.end(first) == YIELDED
    assert len(d.out[first]) == 1
    assert d.tokens(first) == {}
    d.run()
    assert d.end(second) == FINISHED
    assert d.tokens(second) == {1: expected([5] * 30, 3)}


def test_new_requests_join_at_the_next_step() -> None:
    d = Driver()
    first, second = d.prefill(request(1, [5], 20)), d.decode(1)
    d.turn(4)
    joined, third = d.prefill(request(2, [6], 5), batch=1), d.decode(1)
    d.run()
    assert d.end(second) == YIELDED
    assert d.end(joined) in (FINISHED, YIELDED)
    assert d.tokens(first, second, joined, third) == {1: expected([5], 20), 2: expected([6], 5)}


def test_merged_batches_become_one() -> None:
    d = Driver()
    a, b = d.prefill(request(1, [5], 6)), d.prefill(request(2, [6], 6))
    d.run()
    both = d.decode(d.batch_id(a), d.batch_id(b))
    d.run()
    assert d.tokens(a, b, both) == {1: expected([5], 6), 2: expected([6], 6)}
    gone = d.decode(d.batch_id(b))
    d.run()
    assert isinstance(d.errors[gone], NotFound)


def test_max_steps_leaves_the_rest_for_the_next_call() -> None:
    d = Driver()
    a = d.prefill(request(1, [5], 9))
    d.run()
    b = d.decode(1, steps=3)
    d.run()
    assert d.end(b) == MAX_STEPS
    assert len(d.tokens(b)[1]) == 3
    c = d.decode(1)
    d.run()
    assert d.tokens(a, b, c)[1] == expected([5], 9)


def test_batches_run_side_by_side_in_the_same_passes() -> None:
    d = Driver()
    a, b = d.prefill(request(1, [5], 10)), d.prefill(request(1, [6], 10), owner="other")
    c, e = d.decode(1), d.decode(2, owner="other")
    d.run()
    assert d.tokens(a, c) == {1: expected([5], 10)}
    assert d.tokens(b, e) == {1: expected([6], 10)}
    assert len(d.model.sizes) == 10
    assert set(d.model.sizes) == {2}


def test_what_a_call_may_not_do() -> None:
    d = Driver()
    a = d.prefill(request(1, [5], 30))
    d.turn(2)
    cases = {
        d.decode(): InvalidRequest, d.decode(1, 1): InvalidRequest, d.decode(99): NotFound,
        d.decode(1, owner="stranger"): NotFound, d.prefill(request(1, [6], 2), batch=1): AlreadyExists,
        d.prefill(request(7, [6], 2), request(7, [6], 2)): AlreadyExists, d.decode(1, 98): NotFound,
        d.prefill(*(request(i, [5], 2) for i in range(1, 9))): Overloaded,
        d.prefill(*(request(i, [5] * 127, 1) for i in range(1, 7))): Overloaded,
    }
    d.turn(1)
    for call, kind in cases.items():
        assert type(d.errors[call]) is kind
    assert "batch 99 does not exist" in str(d.errors[next(c for c in cases if c.batch_ids == (99,))])
    rest = d.decode(1)
    d.run()
    assert d.tokens(a, rest) == {1: expected([5], 30)}


def test_a_refused_takeover_leaves_the_older_call_at_work() -> None:
    d = Driver(blocks=8)
    a, b = d.prefill(request(1, [5], 100)), d.decode(1)
    d.turn(5)
    refused = d.prefill(request(2, [6] * 120, 2), batch=1)
    d.turn(2)
    assert isinstance(d.errors[refused], Overloaded)
    d.run()
    assert d.end(b) == FINISHED
    assert d.tokens(a, b) == {1: expected([5], 100)}


def test_filter_and_clear_free_at_the_boundary() -> None:
    d = Driver()
    a, b = d.prefill(request(1, [5], 50), request(2, [6], 50)), d.decode(1)
    d.turn(5)
    left = d.executor.filter(1, "", [1, 77])
    d.turn(1)
    assert left.result(0) == 1
    d.turn(3)
    assert len(d.tokens(a, b)[1]) > len(d.tokens(a, b)[2])
    nobody = d.executor.filter(1, "stranger", [])
    everything = d.executor.clear(0, "")
    d.turn(1)
    assert isinstance(nobody.exception(0), NotFound)
    assert everything.result(0) == 1
    d.run()
    assert d.end(b) == FINISHED
    assert d.blocks.free == 40


def test_a_cancelled_call_stops_and_its_batch_is_freed_by_the_lease() -> None:
    d = Driver(lease=0.0)
    d.prefill(request(1, [5], 50))
    call = d.decode(1)
    d.turn(5)
    d.executor.cancel(call)
    d.run()
    assert d.end(call) == CANCELLED
    assert len(d.tokens(call)[1]) < 10
    assert d.blocks.free == 40


def test_rows_sit_out_while_the_client_does_not_read() -> None:
    d = Driver()
    d.reads = False
    a, b = d.prefill(request(1, [5], 100)), d.decode(1)
    d.run()
    assert d.end(a) == FINISHED
    assert len(d.out[b]) == UNREAD_LIMIT
    b.delivered = len(d.out[b])
    d.run()
    assert d.tokens(a, b) == {1: expected([5], 100)}


def test_a_failing_row_ends_alone() -> None:
    d = Driver()
    a = d.prefill(request(1, [5], 6), request(2, [POISON], 6), request(3, [6], 6))
    b = d.decode(1)
    d.run()
    assert d.tokens(a, b) == {1: expected([5], 6), 3: expected([6], 6)}
    errors = [x for c in (a, b) for s in d.out[c] for x in s.details if x.finish_reason == ERROR]
    assert [(e.request_id, e.tokens, e.generated_tokens) for e in errors] == [(2, [], 0)]
    assert "not finite" in str(errors[0].message)


def test_a_failing_step_ends_its_requests_and_nothing_else() -> None:
    d = Driver()
    a = d.prefill(request(1, [5], 6))
    d.model.fails = True
    d.turn(2)
    assert d.end(a) == FINISHED
    assert d.out[a][-1].details[0].message == "the step failed: out of memory"
    assert d.blocks.free == 40
    d.model.fails = False
    b = d.prefill(request(1, [5], 6))
    c = d.decode(2)
    d.run()
    assert d.tokens(b, c) == {1: expected([5], 6)}


def test_prompt_logprobs_come_with_the_first_token_whatever_the_chunks() -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11]
    for chunk in (2, 100):
        d = Driver(step_tokens=chunk)
        call = d.prefill(request(1, prompt, 2, prompt_logprobs=True))
        d.run()
        ids, scores = d.out[call][-1].details[0].prompt_logprobs or ([], [])
        assert ids == prompt
        assert np.isnan(scores[0])
        for i in range(1, len(prompt)):
            likely = follows(prompt[:i]) == prompt[i]
            assert scores[i] == pytest.approx(np.log(np.exp(10 if likely else 0) / (np.exp(10) + VOCAB - 1)), abs=1e-4)


def test_the_youngest_of_the_lowest_priority_goes_first_and_resumes_exactly() -> None:
    d = Driver(blocks=8)
    a = d.prefill(request(1, [5], 100, priority=1), request(2, [6], 100), request(3, [7], 100))
    b = d.decode(1)
    d.run()
    gone = [n for c in (a, b) for s in d.out[c] for n in s.preempted]
    assert gone == [3, 2]
    got = d.tokens(a, b)
    assert got[1] == expected([5], 100)
    for number, first in ((3, 7), (2, 6)):
        prefix = [first, *got[number]]
        again = Request(number, np.array(prefix, dtype=np.int32), len(got[number]), 100)
        call = d.prefill(again)
        rest = d.decode(d.executor._table._next_id)
        d.run()
        assert got[number] + d.tokens(call, rest)[number] == expected([first], 100)


def test_the_oldest_prompt_gets_a_share_however_many_urgent_ones_come() -> None:
    d = Driver(blocks=64)
    low = d.prefill(request(1, [5] * 60, 1))
    for number in range(2, 60):  # an urgent prompt as long as a step may be, in every step
        d.prefill(request(number, [number % 7 + 5] * 16, 1, priority=2), owner=str(number))
        d.turn()
        if d.tokens(low)[1]:
            break
    assert 10 < number < 25  # 4 of 16 tokens a step


def test_a_batch_emptied_by_preemption_ends_its_call() -> None:
    d = Driver(blocks=8)
    old, young = d.prefill(request(1, [5], 120)), d.prefill(request(1, [6], 100), owner="b")
    a, b = d.decode(1), d.decode(2, owner="b")
    d.run()
    assert d.end(b) == FINISHED
    assert [n for c in (young, b) for s in d.out[c] for n in s.preempted] == [1]
    assert d.tokens(old, a) == {1: expected([5], 120)}


def test_chunks_shrink_under_an_itl_target(monkeypatch: pytest.MonkeyPatch) -> None:
    d = Driver(step_tokens=64)
    d.prefill(request(1, [5], 100))
    d.decode(1)
    d.turn(10)
    pace = d.executor._scheduler.pace
    pace._decode.value, pace._per_token.value = 0.001, 0.001
    monkeypatch.setattr(pace, "learn", lambda timings: None)
    before = len(d.model.sizes)
    d.prefill(request(2, [6] * 100, 2), batch=1, itl_target=0.020)  # type: ignore[arg-type]
    d.turn(2)
    assert max(d.model.sizes[before:]) <= 1 + 20


PROMPTS = st.lists(st.integers(3, 45), min_size=1, max_size=40)


@pytest.mark.parametrize("prompts_differ", [False, True])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(PROMPTS, st.integers(1, 60), st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=10),
    st.integers(8, 24), st.integers(1, 20), st.integers(1, 6),
)
def test_a_client_that_resumes_gets_every_request_whole(
    prompts_differ: bool, jobs: list[tuple[list[int], int, int, int]], blocks: int, step_tokens: int, rows: int
) -> None:
    """A small router: joins requests one by one, puts back what is refused or preempted, and loses nothing."""
    d = Driver(blocks=blocks, rows=rows, step_tokens=step_tokens, prompts_differ=prompts_differ)
    says = expected_of_two_kinds if prompts_differ else expected
    wanted = {i + 1: (prompt, min(n, 128 - len(prompt)), priority) for i, (prompt, n, priority, _) in enumerate(jobs)}
    got: dict[int, list[int]] = {n: [] for n in wanted}
    waiting, batch = list(wanted), 0
    ended: set[int] = set()
    calls: list[Call] = []
    arrivals = {i + 1: job[3] for i, job in enumerate(jobs)}
    for turn in range(4000):
        ready = [n for n in waiting if arrivals[n] <= turn]
        if ready and not (calls and len(calls) > 2):
            number = ready[0]
            prompt, count, priority = wanted[number]
            tokens = np.array(prompt + got[number], dtype=np.int32)
            call = d.prefill(
                replace(request(number, prompt, count, priority=priority), tokens=tokens, generated=len(got[number])),
                batch=batch,
            )
            d.turn()
            if call in d.errors:
                assert isinstance(d.errors[call], (Overloaded, NotFound))
                batch = 0 if isinstance(d.errors[call], NotFound) else batch
            else:
                waiting.remove(number)
                batch = d.batch_id(call) if d.out[call] else batch or d.executor._table._next_id - 1
                calls += [call, d.decode(batch)]
        d.turn()
        while calls and (calls[0] in d.errors or d.end(calls[0]) != RUNNING):
            done = calls.pop(0)
            for step in d.out[done]:
                for n, token in zip(step.request_ids, step.token_ids, strict=True):
                    got[n].append(token)
                ended |= {x.request_id for x in step.details if x.finish_reason}
                waiting += step.preempted
        if not calls:
            batch = 0
        if len(ended) == len(wanted):
            break
    assert got == {n: says(prompt, count) for n, (prompt, count, _) in wanted.items()}
    d.run()
    assert d.blocks.free == blocks
    assert d.rows.free == rows


def test_an_unexpected_fault_ends_every_call_with_the_cause() -> None:
    d = Driver()
    a = d.prefill(request(1, [5], 6))

    def broken(step: StepInput) -> torch.Tensor:
        raise ZeroDivisionError("a fault of ours")

    d.model.forward = broken  # type: ignore[method-assign]
    d.executor.start()
    d.executor._thread.join(10)
    assert isinstance(d.errors[a], Unhealthy)
    trouble = d.executor.trouble()
    assert trouble is not None
    assert trouble.kind == "failed"
    assert "a fault of ours" in trouble.reason
