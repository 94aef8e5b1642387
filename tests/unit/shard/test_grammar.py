"""Constrained requests through the executor, over a model that likes every token the same."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import normalizers

from headrace._common.detokenizer import TokenBytes
from headrace._common.errors import HeadraceError
from headrace._common.grammars import Grammar, compile_grammar
from headrace._common.tokenizing import Tokenizer
from headrace_shard.batch import RunningBatch
from headrace_shard.calls import Call
from headrace_shard.executor import Delivery, Executor
from headrace_shard.grammar import compiler as compiling
from headrace_shard.grammar.compiler import GrammarCompiler
from headrace_shard.grammar.state import Constraint
from headrace_shard.grammar.vocabulary import tokens_of
from headrace_shard.kv.blocks import BlockManager
from headrace_shard.requests import EOS_TOKEN, ERROR, LENGTH, STOP_TOKEN, Detail, Request
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.step import StepInput
from tests.models import write_tiny_model
from tests.unit.common.test_detokenizer import sentencepiece, wordpiece

EOS, VOCAB = 2, 320  # 20 rows of the model's head have no token
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}, "required": ["a", "b"],
     "additionalProperties": False},
    {"type": "object", "$defs": {"G": {"enum": ["red", "green"]}}, "properties": {
        "c": {"$ref": "#/$defs/G"}, "d": {"anyOf": [{"type": "integer", "minimum": -9, "maximum": 99}, {"type": "null"}]},
        "e": {"type": "array", "items": {"$ref": "#/$defs/G"}, "maxItems": 2},
    }, "required": ["c", "d", "e"], "additionalProperties": False},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{3}-[0-9]{2}$"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": "é漢🙂"}], "items": False, "minItems": 2},
    {"type": "integer", "exclusiveMinimum": 10, "maximum": 4000, "multipleOf": 5},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": "p"}, "n": {"type": "null"}}, "required": ["k", "n"],
                "additionalProperties": False},
               {"type": "object", "properties": {"k": {"const": "q"}}, "required": ["k"], "additionalProperties": False}]},
]


class FlatModel:
    """The same logits everywhere. `before_forward` may look at the step, or take its time."""

    heartbeat: float | None = None

    def __init__(self) -> None:
        self.before_forward: Callable[[StepInput], None] = lambda step: None

    def forward(self, step: StepInput) -> torch.Tensor:
        self.before_forward(step)
        return torch.zeros(len(step.logit_rows), VOCAB)

    def idle(self) -> None:
        raise AssertionError("no heartbeat was asked for")

    def stop(self) -> None:
        pass


class Driver:
    """An executor without its thread, with a tokenizer in which every byte is a token."""

    def __init__(self, path: Path, blocks: int = 200) -> None:
        self.model, self.path, self.tokenizer = FlatModel(), path, Tokenizer(path)
        tokens = tokens_of(path.read_text("utf-8"), (EOS,))
        assert tokens
        self.compiler = GrammarCompiler(tokens, VOCAB)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, Detail] = {}
        self.preempted: list[int] = []
        self.errors: list[HeadraceError] = []
        self.executor = Executor(
            self.model, RunningBatch(8, 1024), BlockManager(blocks), eos_ids=frozenset({EOS}), vocab_size=VOCAB,
            max_step_tokens=64, batch_lease=60.0, deliver=self.deliver, step_deadline=10, grammars=self.compiler,
        )

    def deliver(self, delivery: Delivery) -> None:
        for call, item in delivery:
            if isinstance(item, HeadraceError):
                self.errors.append(item)
                continue
            call.delivered += 1
            for number, token in zip(item.request_ids, item.token_ids, strict=True):
                self.tokens[number].append(token)
            self.preempted += item.preempted
            self.ends.update({d.request_id: d for d in item.details if d.finish_reason})

    def request(
        self, number: int, grammar: Grammar | None, max_new: int = 400, said: list[int] | None = None, **more: Any
    ) -> Request:
        output = said or []
        constraint = self.compiler.start(grammar, output, max_new - len(output) == 1) if grammar else None
        params = more.pop("params", SamplingParams(sampled=True, seed=number))
        return Request(
            number, np.array([20, 21, *output], dtype=np.int32), len(output), max_new, params=params, constraint=constraint,
            **more,
        )

    def run(self, *requests: Request, until: Callable[[], bool] | None = None) -> None:
        """Prefill and decode until all have ended."""
        self.executor.submit(Call("", (0,), requests))
        self.executor.submit(Call("", (1,)))
        self.go(until or (lambda: all(r.id in self.ends for r in requests)))

    def go(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not until():
            assert not self.errors
            assert time.monotonic() < end, (self.ends, dict(self.tokens))
            if not self.executor.advance():
                time.sleep(0.001)

    def text(self, number: int) -> str:
        ids = [t for t in self.tokens[number] if t != EOS]
        return b"".join(self.tokenizer.bytes_of(t) for t in ids).decode()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny")) / "tokenizer.json"


@pytest.fixture
def driver(path: Path) -> Iterator[Driver]:
    made = Driver(path)
    yield made
    made.compiler.close()


def schema(value: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


@pytest.mark.parametrize("value", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_output_of_a_schema_is_valid(driver: Driver, value: dict[str, Any]) -> None:
    driver.run(*(driver.request(n, schema(value)) for n in range(1, 7)))
    for number in range(1, 7):
        assert driver.ends[number].finish_reason == EOS_TOKEN
        jsonschema.validate(json.loads(driver.text(number)), value)


@pytest.mark.parametrize("pattern", ["(yes|no)(,(yes|no)){3}", "[0-9]{3}-[a-c]+!", "(é|漢|🙂){4}", "[\\x00-\\u2e7f]{3}"])
def test_every_output_of_a_pattern_matches_it(driver: Driver, pattern: str) -> None:
    driver.run(*(driver.request(n, Grammar("regex", pattern)) for n in range(1, 5)))
    for number in range(1, 5):
        assert re.fullmatch(pattern, driver.text(number), re.DOTALL)
        assert driver.ends[number].finish_reason == EOS_TOKEN


@pytest.mark.parametrize(("grammar", "fits"), [
    (Grammar("choice", '["a.b", "c|d", "", "é\\n"]'), lambda text: text in ("a.b", "c|d", "", "é\n")),
    (Grammar("lark", 'start: "x" n ("," n)*\nn: /[0-9]{2}/'), lambda text: re.fullmatch(r"x\d\d(,\d\d)*", text)),
    (Grammar("ebnf", 'root ::= "go " [ab]+ "."\n'), lambda text: re.fullmatch(r"go [ab]+\.", text)),
    (Grammar("json_object", ""), lambda text: text.startswith("{")),
])
def test_other_kinds(driver: Driver, grammar: Grammar, fits: Callable[[str], bool]) -> None:
    driver.run(*(driver.request(n, grammar, 60) for n in range(1, 5)))
    for number in range(1, 5):
        if driver.ends[number].finish_reason == EOS_TOKEN or grammar.kind == "json_object":
            assert fits(driver.text(number))


def test_free_and_greedy_requests_in_the_same_batch(driver: Driver) -> None:
    greedy, free = SamplingParams(), SamplingParams(sampled=True, seed=3)
    driver.run(
        driver.request(1, Grammar("regex", "[5-9]{4}"), params=greedy), driver.request(2, None, 12, params=free),
        driver.request(3, Grammar("regex", "[A-C]{4}")),
    )
    alone = Driver(driver.path)
    alone.run(alone.request(2, None, 12, params=free))
    alone.compiler.close()
    assert driver.text(1) == "5555"
    assert driver.tokens[2] == alone.tokens[2]
    assert re.fullmatch("[A-C]{4}", driver.text(3))


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_request_that_resumes_goes_on_with_the_same_text(driver: Driver, cut: int) -> None:
    grammar = schema(SCHEMAS[1])
    driver.run(driver.request(1, grammar))
    whole = driver.tokens[1]
    again = Driver(driver.path)
    params = SamplingParams(sampled=True, seed=1)
    again.run(again.request(5, grammar, said=whole[:cut], params=params))
    again.compiler.close()
    assert whole[:cut] + again.tokens[5] == whole


def test_a_preempted_request_resumes(path: Path) -> None:
    def grammar() -> Grammar:
        return Grammar("regex", "[a-z]{60}")

    tight = Driver(path, blocks=6)
    tight.run(*(tight.request(n, grammar()) for n in (1, 2, 3)), until=lambda: bool(tight.preempted))
    tight.go(lambda: len(tight.ends) + len(tight.preempted) == 3)
    victim = tight.preempted[0]
    said = list(tight.tokens[victim])
    again = tight.request(victim, grammar(), said=said)
    tight.executor.submit(Call("", (0,), (again,)))
    tight.executor.submit(Call("", (2,)))
    tight.go(lambda: victim in tight.ends)
    tight.compiler.close()
    roomy = Driver(path)
    roomy.run(roomy.request(victim, grammar()))
    roomy.compiler.close()
    assert said
    assert tight.tokens[victim] == roomy.tokens[victim]


def test_ends(driver: Driver) -> None:
    """By length, by a stop id, at a complete grammar whatever the minimum length or ignore_eos say."""
    stop = driver.tokenizer.encode("7", add_special_tokens=False)[0]
    driver.run(
        driver.request(1, Grammar("regex", "[0-9]+"), 5, ignore_eos=True),
        driver.request(2, Grammar("regex", "a7b"), stop_ids=frozenset({stop})),
        driver.request(3, Grammar("regex", "abc"), min_new=9, ignore_eos=True),
        driver.request(4, Grammar("regex", "[ab]*"), min_new=30),
    )
    assert (driver.ends[1].finish_reason, len(driver.tokens[1])) == (LENGTH, 5)
    assert (driver.ends[2].finish_reason, driver.text(2)) == (STOP_TOKEN, "a7")
    assert (driver.ends[3].finish_reason, driver.text(3)) == (EOS_TOKEN, "abc")
    assert driver.ends[4].finish_reason == EOS_TOKEN
    assert len(driver.tokens[4]) > 30


@pytest.mark.parametrize(("grammar", "limit", "whole"), [
    (Grammar("regex", "[a-c]+!"), 6, True), (Grammar("regex", "[0-9]+"), 4, True), (Grammar("regex", "a"), 1, True),
    (Grammar("json_schema", '{"type": "array", "items": {"const": 1}, "x-guidance": {"whitespace_flexible": false}}'), 6, True),
    (Grammar("regex", "a{3}bc"), 4, False), (schema(SCHEMAS[1]), 5, False),
])
def test_what_the_limit_cuts_is_whole_if_one_token_can_make_it_so(
    driver: Driver, grammar: Grammar, limit: int, whole: bool
) -> None:
    driver.run(*(driver.request(n, grammar, limit) for n in range(1, 8)))
    for number in range(1, 8):
        reason, text = driver.ends[number].finish_reason, driver.text(number)
        assert reason == (LENGTH if len(driver.tokens[number]) == limit and driver.tokens[number][-1] != EOS else EOS_TOKEN)
        matcher = compile_grammar(grammar, driver.compiler._tokens)
        assert matcher.consume_tokens([t for t in driver.tokens[number] if t != EOS])
        assert matcher.is_accepting() == (whole or reason == EOS_TOKEN), text


def test_log_probabilities_are_the_models_own(driver: Driver) -> None:
    seen: list[float] = []
    deliver = driver.executor._deliver

    def listen(delivery: Delivery) -> None:
        for _, item in delivery:
            seen.extend(getattr(item, "logprobs", ()))
        deliver(delivery)

    driver.executor._deliver = listen
    driver.run(driver.request(1, Grammar("regex", "abc")))
    assert seen == pytest.approx([-np.log(VOCAB)] * 4, rel=1e-5)


@pytest.mark.parametrize(("grammar", "said", "message"), [
    (Grammar("json_schema", '{"not": {}}'), [], '["not"]'), (Grammar("regex", "("), [], "unclosed group"),
    (Grammar("regex", "abc"), [20], "grammar"),
])
def test_a_bad_grammar_ends_its_request_alone(driver: Driver, grammar: Grammar, said: list[int], message: str) -> None:
    driver.run(driver.request(1, grammar, said=said), driver.request(2, None, 8), driver.request(3, Grammar("regex", "a{6}")))
    assert driver.ends[1].finish_reason == ERROR
    assert message in (driver.ends[1].message or "")
    assert driver.ends[2].finish_reason in (LENGTH, EOS_TOKEN)
    assert driver.text(3) == "aaaaaa"


def test_a_vocabulary_that_cannot_write_the_grammar(driver: Driver) -> None:
    driver.compiler._vocab_size = 10  # the model has no row for any letter
    driver.run(driver.request(1, Grammar("regex", "a+")))
    assert driver.ends[1].message == "grammar: the vocabulary has no token that can follow"


def test_a_slow_mask_holds_up_its_own_row_alone(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, waits = GrammarCompiler._fill, {"on": False}

    def slow(self: GrammarCompiler, constraint: Constraint, matcher: Any) -> Any:
        if constraint.grammar.source == "[ab]{3}c":
            while waits["on"]:
                time.sleep(0.001)
        return fill(self, constraint, matcher)

    monkeypatch.setattr(GrammarCompiler, "_fill", slow)
    waits["on"] = True
    slow_one, fast_one = Grammar("regex", "[ab]{3}c"), Grammar("regex", "[xy]{9}")
    driver.compiler._matcher(fast_one)
    driver.run(driver.request(1, fast_one), until=lambda: len(driver.tokens[1]) == 1)
    driver.executor.submit(Call("", (1,), (driver.request(2, slow_one), driver.request(3, None, 5))))
    driver.executor.submit(Call("", (1,)))
    driver.go(lambda: {1, 3} <= set(driver.ends))
    assert driver.tokens[2] == []
    assert not driver.executor.advance()  # nothing is computed for a row that only waits
    waits["on"] = False
    driver.go(lambda: 2 in driver.ends)
    assert re.fullmatch("[ab]{3}c", driver.text(2))


def test_a_grammar_is_compiled_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Grammar] = []

    def count(grammar: Grammar, tokens: Any) -> Any:
        compiled.append(grammar)
        return compile_grammar(grammar, tokens)

    monkeypatch.setattr(compiling, "compile_grammar", count)
    driver.run(*(driver.request(n, Grammar("regex", "[ab]{8}")) for n in range(1, 7)))
    assert len(compiled) == 1
    assert len({driver.text(n) for n in range(1, 7)}) > 1


@pytest.mark.parametrize("strip", [False, True])
def test_byte_fallback_tokens_are_what_the_detokenizer_makes_of_them(strip: bool) -> None:
    made = sentencepiece(strip)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokens, ours = tokens_of(made.to_str(), (1,)), TokenBytes(made)
    assert tokens
    assert all(tokens.decode_bytes([i]) == ours(i) for i in range(2, made.get_vocab_size()) if i != made.token_to_id("<0xFF>"))
    matcher, said = compile_grammar(Grammar("regex", "the sky( is)+ é世!"), tokens), b""
    mask = np.zeros((1, (tokens.vocab_size + 31) // 32), dtype=np.int32)
    while not matcher.is_stopped():
        fill_next_token_bitmask(matcher, mask)
        token = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))[-1])
        said += ours(token)
        matcher.consume_token(token)
    assert re.fullmatch("the sky( is)+ é世!", said.decode())


def test_a_tokenizer_of_another_kind_offers_no_grammars() -> None:
    assert tokens_of(wordpiece().to_str(), (0,)) is None
    assert tokens_of(sentencepiece().to_str(), (1000,)) is None
