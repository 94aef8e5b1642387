"""What each server is asked to do, and whether it did all of it.

Prompts are token ids, so that every server reads exactly as many tokens; they differ from request to request and from
round to round, so that no cache of prefixes can help. Answers are greedy and have exactly the length asked for: one of
another length makes no figure.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import uvloop

from headrace._common.tokenizing import Tokenizer
from headrace_launcher.bench import load
from headrace_launcher.bench.events import Answer
from headrace_launcher.bench.prompts import numbered_list
from headrace_launcher.bench.stats import median

REQUEST_SECONDS = 300.0


class Invalid(Exception):
    """A server did not do what was asked; the message says what it did."""


@dataclass(frozen=True)
class Workload:
    """`streams` requests at once, `repeats` times one after the other."""

    name: str
    streams: int
    input_tokens: int
    output_tokens: int
    repeats: int = 1

    @property
    def requests(self) -> int:
        """Requests of one measurement."""
        return self.streams * self.repeats

    def quick(self) -> Workload:
        """A smaller one, which shows that everything works."""
        return replace(self, output_tokens=min(self.output_tokens, 32), repeats=1)

    def prompts(self, tokenizer: Tokenizer, label: str) -> list[list[int]]:
        """Prompts of exactly `input_tokens` tokens: others for another label, another workload, another request."""
        found = []
        for i in range(self.requests):
            seed = zlib.crc32(f"{label}, {self.name}, {i}".encode())
            found.append(tokenizer.encode(numbered_list(2 * self.input_tokens, seed))[: self.input_tokens])
        assert all(len(prompt) == self.input_tokens for prompt in found)
        return found


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one measurement."""

    output: float  # output tokens, prompts' time included
    decode: float | None  # tokens after the first, by the time after it; the median of the streams
    prefill: float | None  # prompt tokens by the time of an answer of one token; the median of the requests


ONE = Workload("1 stream", 1, 128, 128)
EIGHT = Workload("8 streams", 8, 128, 128)
MANY = Workload("32 streams", 32, 128, 128)
SHORT_PROMPT = Workload("prefill 128", 1, 128, 1, repeats=4)
LONG_PROMPT = Workload("prefill 2000", 1, 2000, 1)
WORKLOADS = (ONE, EIGHT, MANY, SHORT_PROMPT, LONG_PROMPT)


def ask(url: str, workload: Workload, prompts: Sequence[list[int]], ignore_eos: bool) -> Rates:
    """Send the prompts and measure.

    Raises:
        Invalid: a request failed, or a prompt or an answer has another length than it should.
    """
    spec = load.Load(
        url, concurrency=workload.streams, output_len=workload.output_tokens, ignore_eos=ignore_eos, timeout=REQUEST_SECONDS
    )
    outcome = uvloop.run(load.run(spec, prompts))
    check(workload, outcome.answers)
    return rates(workload, outcome)


def answer(url: str, prompt: list[int], tokens: int, ignore_eos: bool) -> str:
    """The text of a greedy answer, so that a reader can see that a server runs the model it is said to run.

    Raises:
        Invalid: the request failed.
    """
    spec = load.Load(url, output_len=tokens, ignore_eos=ignore_eos, timeout=REQUEST_SECONDS)
    [found] = uvloop.run(load.run(spec, [prompt])).answers
    if found.error is not None:
        raise Invalid(found.error)
    return found.text


def check(workload: Workload, answers: Sequence[Answer]) -> None:
    """Compare the servers' own counts with what was asked.

    Raises:
        Invalid: they differ, or there are none.
    """
    for answer in answers:
        if answer.error is not None and not (answer.error == "no output" and answer.completion_tokens == 1):
            raise Invalid(answer.error)  # a single token may be without text
        if answer.prompt_tokens != workload.input_tokens:
            raise Invalid(f"a prompt of {workload.input_tokens} tokens was counted as {answer.prompt_tokens}")
        if answer.completion_tokens != workload.output_tokens:
            raise Invalid(f"an answer has {answer.completion_tokens} tokens instead of {workload.output_tokens}")


def rates(workload: Workload, outcome: load.Outcome) -> Rates:
    """Rates of a load that did what was asked."""
    if workload.output_tokens == 1:
        prefill = median([workload.input_tokens / (sent.ended - sent.began) for sent in outcome.sent])
        return Rates(outcome.output_rate, None, prefill)
    decode = outcome.decode_rates
    return Rates(outcome.output_rate, median(decode) if decode else None, None)
