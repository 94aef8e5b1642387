"""What the engine makes of traffic: shared prefixes, long prompts beside chats, text that repeats itself. A record each.

Each pair of figures comes from the same run: with the prefix cache and without, chats alone and beside long prompts, with
speculation and without, in float32 with the model's own 4-bit weights as its draft and without.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise

import uvloop

from bench.figures import Figure, Result
from bench.processes import embedded_model
from headrace._common.tokenizing import Tokenizer
from headrace_launcher.bench import load
from headrace_launcher.bench.prompts import numbered_list
from headrace_launcher.bench.stats import median, percentile
from headrace_launcher.models import embedded
from tests.processes import Service

ROUNDS = 3
SHARED_TOKENS, SHARERS = 1500, 32
CHATS, LONG_TOKENS, CHAT_TOKENS = 8, 4000, 192
SPECULATE = 6


def shared_prefix() -> Result:
    """The time of requests that begin alike, with the cache over without it."""
    setup = {"rounds": ROUNDS, "shared_tokens": SHARED_TOKENS, "sharers": SHARERS}
    result, tokenizer = Result("shared_prefix", setup=setup), model_tokenizer()
    on, off = Service(), Service("--no-prefix-caching")
    ratios, cached, plain = [], [], []
    try:
        for turn in range(ROUNDS):
            prefix = ids(tokenizer, SHARED_TOKENS, 1000 + turn)
            prompts = [prefix + ids(tokenizer, 20, 100 * turn + i) for i in range(SHARERS)]
            cached.append(serve(on.wait_ready(), prompts, 16).wall)
            plain.append(serve(off.wait_ready(), prompts, 16).wall)
            ratios.append(cached[-1] / plain[-1])
    finally:
        on.stop()
        off.stop()
    result.figures = [
        Figure("shared prefix, without the cache", "s", median(plain), samples=tuple(plain)),
        Figure("shared prefix, with it", "s", median(cached), samples=tuple(cached)),
        Figure("shared prefix, with / without", "x", median(ratios), below=0.3, samples=tuple(ratios)),
    ]
    return result


def long_prompts() -> Result:
    """How far apart the tokens of chats are while long prompts come one after the other."""
    setup = {"rounds": ROUNDS, "chats": CHATS, "chat_tokens": CHAT_TOKENS, "long_tokens": LONG_TOKENS}
    result, tokenizer = Result("long_prompts", setup=setup), model_tokenizer()
    service = Service("--max-input-tokens", "6000", "--max-total-tokens", "6200")
    try:
        service.wait_ready()
        serve(service, [ids(tokenizer, 200, 7)], 8)
        alone, beside, chunk = [], [], []
        for turn in range(ROUNDS):
            chats = [ids(tokenizer, 100, 50 * turn + i) for i in range(CHATS)]
            alone += gaps(serve(service, chats, CHAT_TOKENS))
            outcome, longest = uvloop.run(with_long_prompts(service, tokenizer, chats, turn))
            beside += gaps(outcome)
            chunk.append(longest)
    finally:
        service.stop()
    result.figures = [
        Figure("chats alone, p50 between tokens", "ms", percentile(alone, 50) * 1e3),
        Figure("chats beside long prompts, p99 between tokens", "ms", percentile(beside, 99) * 1e3),
        Figure("the same / twice the p50 and one step of 100 ms", "x",
               percentile(beside, 99) / (2 * percentile(alone, 50) + 0.1), below=1),
        Figure("a long prompt's first token", "s", median(chunk), samples=tuple(chunk)),
    ]
    return result


async def with_long_prompts(
    service: Service, tokenizer: Tokenizer, chats: Sequence[load.Prompt], turn: int
) -> tuple[load.Outcome, float]:
    """Chats, and beside them a long prompt whenever the last one has its first token; with that one's mean time to it."""
    spec = load.Load(service.url, concurrency=len(chats), output_len=CHAT_TOKENS, ignore_eos=True)
    task, number, times = asyncio.create_task(load.run(spec, chats)), 0, []
    await asyncio.sleep(0.5)
    while not task.done():
        number += 1
        prompt = ids(tokenizer, LONG_TOKENS, 10_000 + 100 * turn + number)
        began = time.perf_counter()
        await load.run(load.Load(service.url, output_len=1, ignore_eos=True), [prompt])
        times.append(time.perf_counter() - began)
    return await task, median(times)


def speculation() -> Result:
    """Tokens per second of one stream with guesses over without: text that copies its prompt, and text that does not."""
    result, tokenizer = Result("speculation", setup={"rounds": ROUNDS, "speculate": SPECULATE}), model_tokenizer()
    plain, guessing = Service(), Service("--speculate", str(SPECULATE))
    copying: list[float] = []
    free: list[float] = []
    try:
        for turn in range(ROUNDS):
            lines = "\n".join(f"item {i}: the {w} is ready" for i, w in enumerate(words(turn)))
            task = f"<|im_start|>user\nRepeat exactly:\n{lines}<|im_end|>\n<|im_start|>assistant\n"
            copy = tokenizer.encode(f"{task}{lines}\n{lines}\n")
            other = tokenizer.encode(f"Once upon a time a {words(turn)[0]} met a {words(turn)[1]}, and")
            for prompt, into in ((copy, copying), (other, free)):
                rates = [median(serve(s.wait_ready(), [prompt], 128).decode_rates) for s in (plain, guessing)]
                into.append(rates[1] / rates[0])
    finally:
        plain.stop()
        guessing.stop()
    result.figures = [
        Figure("speculation on text that copies, with / without", "x", median(copying), at_least=1.4, samples=tuple(copying)),
        Figure("speculation on other text, with / without", "x", median(free), at_least=0.97, samples=tuple(free)),
    ]
    return result


def draft_model() -> Result:
    """Tokens per second of one stream in float32, greedy and sampled, with the 4-bit weights as its draft over without."""
    result, tokenizer = Result("draft_model", setup={"rounds": ROUNDS}), model_tokenizer()
    exact = ("--dtype", "float32")
    plain, guessing = Service(*exact), Service(*exact, "--draft-model-id", embedded.NAME)
    ratios: dict[float, list[float]] = {0.0: [], 0.8: []}
    try:
        for turn in range(ROUNDS):
            prompt = tokenizer.encode(f"Once upon a time a {words(turn)[0]} met a {words(turn)[1]}, and")
            for temperature, into in ratios.items():
                rates = [median(serve(s.wait_ready(), [prompt], 96, temperature).decode_rates) for s in (plain, guessing)]
                into.append(rates[1] / rates[0])
    finally:
        plain.stop()
        guessing.stop()
    result.figures = [
        Figure("draft model of 4 bits for float32, with / without", "x", median(ratios[0.0]), samples=tuple(ratios[0.0])),
        Figure("the same at temperature 0.8", "x", median(ratios[0.8]), samples=tuple(ratios[0.8])),
    ]
    return result


def model_tokenizer() -> Tokenizer:
    """The default model's."""
    return Tokenizer(embedded_model() / "tokenizer.json")


def words(seed: int) -> list[str]:
    """A dozen nouns."""
    return [line.split(". ")[1] for line in numbered_list(60, seed).splitlines()]


def ids(tokenizer: Tokenizer, tokens: int, seed: int) -> list[int]:
    """A prompt of so many tokens."""
    return tokenizer.encode(numbered_list(2 * tokens + 8, seed))[:tokens]


def gaps(outcome: load.Outcome) -> list[float]:
    """Seconds between the tokens of each answer."""
    return [b - a for answer in outcome.answers for a, b in pairwise(answer.times)]


def serve(service: Service, prompts: Sequence[load.Prompt], tokens: int, temperature: float = 0.0) -> load.Outcome:
    """All prompts at once.

    Raises:
        RuntimeError: an answer failed, or ended early, and so would make a figure of less work.
    """
    spec = load.Load(service.url, concurrency=len(prompts), output_len=tokens, ignore_eos=True, temperature=temperature)
    outcome = uvloop.run(load.run(spec, prompts))
    if outcome.errors() or any(answer.tokens != tokens for answer in outcome.answers):
        raise RuntimeError(f"errors: {outcome.errors()}; answers of {[a.tokens for a in outcome.answers]} tokens")
    return outcome
