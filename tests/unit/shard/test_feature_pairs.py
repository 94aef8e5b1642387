"""No feature changes a request's text, whatever others are on: prefix cache, speculation by lookup and by a draft model,
preemption and chunks, crossed with sampling, penalties, minimum lengths and grammars.

The reference is each request alone, with everything off. A client that resumes stands where the router does.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from headrace._common.errors import HeadraceError, NotFound, Overloaded
from headrace._common.grammars import Grammar
from headrace_shard.batch import RunningBatch
from headrace_shard.calls import Call
from headrace_shard.draft import DraftModel
from headrace_shard.executor import Delivery, Executor
from headrace_shard.grammar.compiler import GrammarCompiler
from headrace_shard.grammar.vocabulary import tokens_of
from headrace_shard.kv.blocks import BlockManager
from headrace_shard.requests import ERROR, Request
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.step import StepInput
from tests.models import write_tiny_model
from tests.unit.shard.test_executor import MemoryModel, TwoKinds

EOS, VOCAB, LONGEST = 2, 300, 160
MANY, FEW = 120, 14  # KV blocks; FEW are less than the requests take together, and enough for each
OBJECT = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string", "minLength": 9, "maxLength": 20}, '
                                '"b": {"type": "boolean"}}, "required": ["a", "b"], "additionalProperties": false}')
DIGITS = Grammar("regex", "[0-9]{3}(-[0-9]{3}){4,9}")


class Peaked(MemoryModel):
    """Mostly repeats itself, so that guesses are right, but every logit depends on all tokens before it."""

    vocab_size = VOCAB

    def forward(self, step: StepInput) -> torch.Tensor:
        contexts = self.contexts(step)
        rows = [self.scores(contexts[row]) for row in step.logit_rows.tolist()]
        return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(-1, VOCAB))

    @staticmethod
    def scores(tokens: list[int]) -> np.ndarray:
        digest = hashlib.sha256(np.array(tokens, dtype=np.int32).tobytes()).digest()
        scores = np.random.default_rng(int.from_bytes(digest[:8], "little")).normal(0, 1, VOCAB)
        scores[20 + (tokens[-1] * 3 + len(tokens) // 40) % 7] += 9
        if digest[8] < 24:
            scores[EOS if digest[9] < 96 else 30 + digest[9] % 8] += 12
        return scores


class PeakedOfTwoKinds(TwoKinds, Peaked):
    """The same, where prompts are computed otherwise than generated tokens."""


class Rough(Peaked):
    """A draft model: its logits are those of the other, and some noise."""

    @staticmethod
    def scores(tokens: list[int]) -> np.ndarray:
        return Peaked.scores(tokens) + np.random.default_rng(len(tokens)).normal(0, 1, VOCAB)


GREEDY = SamplingParams()


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    most: int
    params: SamplingParams = GREEDY
    min_new: int = 0
    grammar: Grammar | None = None
    ignore_eos: bool = False


COMMON = [20 + n % 7 for n in range(40)]  # a shared beginning, and one that repeats itself
SEEDED = SamplingParams(sampled=True, temperature=0.9, seed=5)
HOT = SamplingParams(sampled=True, temperature=3.0, top_k=30, seed=6)
PENALTIES = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
BOTH = SamplingParams(sampled=True, temperature=1.5, seed=7, repetition_penalty=1.2, frequency_penalty=0.3)
JOBS = {
    1: Job(COMMON, 90, ignore_eos=True), 2: Job([*COMMON, 50], 60, SEEDED), 3: Job([*COMMON, 51], 60, PENALTIES),
    4: Job(COMMON, 70, min_new=50), 5: Job([*COMMON, 52], 50, HOT, min_new=30), 6: Job(COMMON[:20], 80, BOTH, min_new=40),
    7: Job([*COMMON, 53], 110, SEEDED, grammar=OBJECT), 8: Job(COMMON, 45, PENALTIES, min_new=25, grammar=DIGITS),
    9: Job([60, 61], 90, PENALTIES, min_new=60, ignore_eos=True),
}


@dataclass
class Server:
    """An executor, and a client that sends what was refused or preempted again."""

    compiler: GrammarCompiler
    caching: bool = False
    speculate: int = 0
    blocks: int = MANY
    step_tokens: int = 64
    draft: bool = False
    prompts_differ: bool = False
    got: dict[int, list[int]] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    accepted: int = 0
    of_model: int = 0
    errors: dict[Call, HeadraceError] = field(default_factory=dict)
    begun: dict[Call, int] = field(default_factory=dict)  # batch ids

    def __post_init__(self) -> None:
        self.manager, self.rows = BlockManager(self.blocks), RunningBatch(8, LONGEST)
        model = PeakedOfTwoKinds if self.prompts_differ else Peaked
        self.executor = Executor(
            model(self.blocks), self.rows, self.manager, eos_ids=frozenset({EOS}), vocab_size=VOCAB,
            max_step_tokens=self.step_tokens, batch_lease=60.0, deliver=self.deliver, step_deadline=10,
            prefix_caching=self.caching, speculate=self.speculate, grammars=self.compiler,
            draft=DraftModel(Rough(FEW), LONGEST - 20, FEW) if self.draft else None, prompts_differ=self.prompts_differ,
        )
        pace = self.executor._scheduler.pace
        pace.draft_price = pace.round_price = pace.catch_up_price = lambda: 0.01  # type: ignore[method-assign]
        self.left: set[int] = set()
        self.waiting: list[int] = []

    def deliver(self, delivery: Delivery) -> None:
        for call, item in delivery:
            if isinstance(item, HeadraceError):
                self.errors[call] = item
                continue
            call.delivered += 1
            self.begun[call] = item.batch_id
            for number, token in zip(item.request_ids, item.token_ids, strict=True):
                self.got[number].append(token)
            for detail in item.details:
                assert detail.finish_reason != ERROR, detail.message
                if detail.finish_reason:
                    self.left.discard(detail.request_id)
            self.preempted += item.preempted
            self.waiting += item.preempted
            self.accepted += item.timings.accepted_tokens
            self.of_model += item.timings.model_accepted_tokens

    def run(self, jobs: dict[int, Job]) -> dict[int, list[int]]:
        self.got = {number: [] for number in jobs}
        self.left, self.waiting = set(jobs), list(jobs)
        batch, end = 0, time.monotonic() + 60
        while self.left:
            assert time.monotonic() < end, self.got
            if self.waiting:
                number = self.waiting[0]
                call = Call("", (batch,), (self.request(number, jobs[number]),))
                self.executor.submit(call)
                self.go(partial(self.answered, call))
                if call in self.errors:
                    assert isinstance(self.errors[call], (Overloaded, NotFound))
                    batch = 0 if isinstance(self.errors[call], NotFound) else batch
                else:
                    self.waiting.remove(number)
                    batch = self.begun[call]
                self.executor.submit(Call("", (batch,)))
            for _ in range(4):
                self.step()
        self.go(lambda: self.rows.free == 8)
        return self.got

    def request(self, number: int, job: Job) -> Request:
        said = self.got[number]
        constraint = self.compiler.start(job.grammar, said, job.most - len(said) == 1) if job.grammar else None
        return Request(
            number, np.array([*job.prompt, *said], dtype=np.int32), len(said), job.most, params=job.params,
            min_new=job.min_new, ignore_eos=job.ignore_eos, constraint=constraint,
        )

    def answered(self, call: Call) -> bool:
        return call in self.errors or call in self.begun

    def step(self) -> None:
        if not self.executor.advance():
            time.sleep(0.0005)

    def go(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not until():
            assert time.monotonic() < end
            self.step()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny")) / "tokenizer.json"
    tokens = tokens_of(path.read_text("utf-8"), (EOS,))
    assert tokens
    made = GrammarCompiler(tokens, VOCAB)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(compiler: GrammarCompiler) -> dict[int, list[int]]:
    """Each request by itself, with nothing on."""
    return {number: Server(compiler).run({number: job})[number] for number, job in JOBS.items()}


@pytest.fixture(scope="module")
def alone_of_two_kinds(compiler: GrammarCompiler) -> dict[int, list[int]]:
    return {n: Server(compiler, prompts_differ=True).run({n: job})[n] for n, job in JOBS.items()}


def test_the_requests_are_what_they_are_meant_to_be(alone: dict[int, list[int]]) -> None:
    lengths = {number: len(tokens) for number, tokens in alone.items()}
    assert lengths[1] == 90
    assert 50 <= lengths[4] <= 70
    assert any(alone[number][-1] == EOS for number in (2, 3, 4, 5, 6))
    assert alone[7][-1] == alone[8][-1] == EOS
    assert len({tuple(tokens[:20]) for tokens in alone.values()}) == len(JOBS) - 1  # 4 begins as 1 does


@pytest.mark.parametrize(
    ("caching", "guesses", "blocks", "step_tokens"),
    [*itertools.product((False, True), ("none", "lookup", "model"), (MANY, FEW), (10, 64))],
)
def test_no_feature_changes_a_text(
    compiler: GrammarCompiler, alone: dict[int, list[int]], caching: bool, guesses: str, blocks: int, step_tokens: int
) -> None:
    server = Server(compiler, caching, 0 if guesses == "none" else 4, blocks, step_tokens, guesses == "model")
    got = server.run(JOBS)
    assert got == alone
    assert bool(server.executor._prefix.hits) == caching
    assert bool(server.accepted) == (guesses != "none")
    assert bool(server.of_model) == (guesses == "model")
    assert bool(server.preempted) == (blocks == FEW)  # other ones for other features
    assert server.manager.free == blocks
    drafter = server.executor._speculation._drafter
    assert drafter is None or drafter.blocks.free == FEW


@pytest.mark.parametrize("guesses", ["none", "lookup", "model"])
@pytest.mark.parametrize("caching", [False, True])
def test_nor_where_prompts_differ(
    compiler: GrammarCompiler, alone: dict[int, list[int]], alone_of_two_kinds: dict[int, list[int]], caching: bool,
    guesses: str,
) -> None:
    server = Server(compiler, caching, 0 if guesses == "none" else 4, FEW, 10, guesses == "model", prompts_differ=True)
    assert server.run(JOBS) == alone_of_two_kinds != alone
    assert bool(server.executor._prefix.hits) == caching
    assert bool(server.accepted) == (guesses != "none")
    assert server.preempted


@pytest.mark.parametrize("guesses", ["lookup", "model"])
@pytest.mark.parametrize("number", [7, 8])
def test_guesses_keep_to_the_grammar(
    compiler: GrammarCompiler, alone: dict[int, list[int]], number: int, guesses: str
) -> None:
    server = Server(compiler, speculate=4, draft=guesses == "model")
    assert server.run({number: JOBS[number]})[number] == alone[number]
    assert server.accepted > len(alone[number]) // 8
