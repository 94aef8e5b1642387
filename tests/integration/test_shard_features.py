"""Real shard processes with prefix cache, speculation and a small KV pool, two by two, and two ranks with all of these and
a draft model: the texts of a plain one.

A client that resumes what was preempted stands where the router does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from headrace._common.intermediate import read_step
from headrace.v1 import generation_pb2 as pb
from tests.processes import ShardGroup, ShardProcess

OFF = ("--max-step-tokens", "48", "--max-batch-size", "8", "--max-total-tokens", "256")
PLAIN = ("--no-prefix-caching",)
SPECULATE, SMALL = ("--speculate", "4"), ("--max-batch-total-tokens", "288")
PAIRS = {"cache, speculation": SPECULATE, "cache, preemption": SMALL, "speculation, preemption": (*SPECULATE, *SMALL, *PLAIN)}
PREFIX = "the mill the mill the mill the mill the mill the mill "
SCHEMA = '{"type": "object", "properties": {"a": {"type": "string", "minLength": 40, "maxLength": 60}}, "required": ["a"]}'
PENALTIES: dict[str, float] = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
MIXED = {"temperature": 2.0, "top_p": 0.9, "seed": 4, **PENALTIES}
REQUESTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [  # text, stopping, sampling, grammar
    (PREFIX, {"max_new_tokens": 120, "ignore_eos": True}, {}, ""),
    (PREFIX + "a", {"max_new_tokens": 90, "min_new_tokens": 80}, {"temperature": 1.2, "seed": 3}, ""),
    (PREFIX + "b", {"max_new_tokens": 90, "ignore_eos": True}, PENALTIES, ""),
    (PREFIX + "c", {"max_new_tokens": 90, "min_new_tokens": 70}, MIXED, ""),
    (PREFIX, {"max_new_tokens": 100}, {"temperature": 0.8, "seed": 5}, SCHEMA),
    (PREFIX, {"max_new_tokens": 190, "ignore_eos": True}, {"logit_bias": {101: 60.0, 102: 60.0}}, ""),  # repeats itself
    (PREFIX + "d", {"max_new_tokens": 90, "min_new_tokens": 60}, PENALTIES, SCHEMA),
]
NUMBERS = range(1, len(REQUESTS) + 1)


class Client:
    """Sends requests until each has ended, and joins the parts of those that were preempted."""

    def __init__(self, process: ShardProcess, tokenizer: Tokenizer) -> None:
        self.process, self.tokenizer = process, tokenizer
        self.got: dict[int, list[int]] = {}
        self.preempted: set[int] = set()
        self.drafted = self.of_model = 0

    def run(self, *numbers: int) -> dict[int, list[int]]:
        self.got = {number: [] for number in numbers}
        left = list(numbers)
        while left:
            batch = left
            while not (ended := self.send(batch)):
                batch = batch[: len(batch) // 2]
                assert batch
            left = [number for number in left if number not in ended]
        return self.got

    def send(self, numbers: list[int]) -> set[int]:
        """Run these until they end or are preempted; returns those that have ended: none if there is no room for all."""
        requests, ended = [self.request(number) for number in numbers], set[int]()
        try:
            prefill = pb.PrefillRequest(requests=requests, max_step_tokens=31)
            last = self.read(self.process.stub.Prefill(prefill, timeout=60), ended)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return set()
            raise
        if last.running:
            self.read(self.process.stub.Decode(pb.DecodeRequest(batch_ids=[last.batch_id]), timeout=60), ended)
        return ended

    def read(self, steps: Any, ended: set[int]) -> pb.Step:
        for step in steps:
            for item in read_step(step):
                self.got[item.request_id].append(item.token.id)
            for detail in step.details:
                assert detail.finish_reason != pb.Detail.ERROR, detail.message
                if detail.is_end:
                    ended.add(detail.request_id)
            self.preempted |= set(step.preempted)
            self.drafted += step.timings.draft_tokens
            self.of_model += step.timings.model_accepted_tokens
        last: pb.Step = step
        return last

    def request(self, number: int) -> pb.Request:
        text, stopping, sampling, grammar = REQUESTS[number - 1]
        said = self.got[number]
        return pb.Request(
            id=number, token_ids=pb.TokenIds(ids=self.tokenizer.encode(text).ids + said), generated=len(said),
            stopping=pb.Stopping(**stopping), sampling=pb.Sampling(**sampling),
            grammar=pb.Grammar(type="json_schema", value=grammar) if grammar else None,
        )


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def alone(shard: Callable[..., ShardProcess], tiny_model: Path, tokenizer: Tokenizer) -> dict[int, list[int]]:
    """Each request by itself, at a shard with everything off."""
    client = Client(shard(tiny_model, *OFF, *PLAIN), tokenizer)
    return {number: client.run(number)[number] for number in NUMBERS}


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs(
    shard: Callable[..., ShardProcess], tiny_model: Path, tokenizer: Tokenizer, alone: dict[int, list[int]], pair: str
) -> None:
    process = shard(tiny_model, *OFF, *PAIRS[pair])
    client = Client(process, tokenizer)
    for turn in range(2):  # the second one finds what the first has left in the cache
        assert client.run(*NUMBERS) == alone, turn
    assert bool(client.preempted) == ("preemption" in pair)
    assert bool(client.drafted) == ("speculation" in pair)
    last = list(process.stub.Prefill(pb.PrefillRequest(requests=[probe()]), timeout=60))[-1]
    assert last.cache.free_blocks == last.cache.blocks
    assert bool(last.cache.hit_tokens) == ("cache" in pair)


def test_two_ranks_with_a_draft_model(
    shard_group: Callable[..., ShardGroup], tiny_model: Path, tokenizer: Tokenizer, alone: dict[int, list[int]]
) -> None:
    """The model is its own draft, which the leading rank runs whole: most guesses are right, as long as they are made."""
    group = shard_group(tiny_model, 2, *OFF, *SMALL, *SPECULATE, "--draft-model-folder", str(tiny_model))
    client = Client(group.ranks[0], tokenizer)
    assert client.run(*NUMBERS) == alone
    assert client.preempted
    assert client.of_model


def probe() -> pb.Request:
    """A request of one token, whose step says how the pool is."""
    return pb.Request(id=1, text="x", stopping=pb.Stopping(max_new_tokens=1))
