"""A load client for any server that speaks OpenAI's or TGI's API. Streams requests and prints one JSON object.

    python -m bench.load --url http://127.0.0.1:3000 --api tgi --concurrency 8 --requests 16

Closed loop (`--concurrency` requests at a time) or, with `--rate`, Poisson arrivals. TTFT runs from the sending of a
request to the first event with output, ITL is the gap between two such events. Tokens are counted by the server's own
usage where it reports one, else by events.

Lengths: prompts of about `--input-len` tokens (the server's own count is reported) that run on, `--output-len` tokens.
With `--ignore-eos` a server that knows `ignore_eos` and `min_tokens` goes past end tokens as well; Headrace's routes and
TGI's do not. Answers that ended early are counted in `short_answers`, so that nobody takes a figure of less work for
more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import aiohttp
import uvloop

from bench.events import Answer, Api, Chunk, read_answer
from bench.prompts import numbered_list
from bench.stats import percentile, summary

Prompt = str | list[int]  # text, or token ids (completions only)
PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "tgi": "/generate_stream"}


@dataclass(frozen=True)
class Load:
    """How to send the requests."""

    url: str
    api: Api = "completions"
    concurrency: int = 1
    rate: float = 0.0  # arrivals per second; 0 = closed loop
    output_len: int = 128
    temperature: float = 0.0  # 0 = greedy
    ignore_eos: bool = False
    model: str = "model"
    api_key: str | None = None
    timeout: float = 600.0  # seconds for one request
    seed: int = 1  # of the arrival times


@dataclass
class Sent:
    """One request on its way; times are of time.perf_counter()."""

    began: float = 0.0
    ended: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a load gave. Times are in seconds."""

    wall: float
    sent: list[Sent]
    answers: list[Answer]

    @property
    def tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def output_rate(self) -> float:
        """Output tokens per second, from the first request to the last answer."""
        return self.tokens / self.wall

    @property
    def decode_rates(self) -> list[float]:
        """Tokens per second after the first token, of each answer."""
        rates = []
        for answer in self.answers:
            if answer.error is None and answer.tokens > 1 and answer.times[-1] > answer.times[0]:
                rates.append((answer.tokens - 1) / (answer.times[-1] - answer.times[0]))
        return rates

    def errors(self) -> dict[str, int]:
        """How often each error came."""
        return dict(Counter(answer.error for answer in self.answers if answer.error is not None))


def make_body(load: Load, prompt: Prompt) -> dict[str, Any]:
    """The JSON body of one request.

    Raises:
        ValueError: token ids for an API that takes none.
    """
    if load.api == "tgi":
        _need_text(prompt)
        parameters: dict[str, Any] = {"max_new_tokens": load.output_len, "details": True}
        if load.temperature > 0:
            parameters |= {"do_sample": True, "temperature": load.temperature}
        return {"inputs": prompt, "parameters": parameters, "stream": True}
    body: dict[str, Any] = {
        "model": load.model, "max_tokens": load.output_len, "temperature": load.temperature, "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body |= {"ignore_eos": True, "min_tokens": load.output_len}
    if load.api == "completions":
        return {**body, "prompt": prompt}
    _need_text(prompt)
    return {**body, "messages": [{"role": "user", "content": prompt}]}


def _need_text(prompt: Prompt) -> None:
    if not isinstance(prompt, str):
        raise ValueError("only completions takes token ids")


async def _send(session: aiohttp.ClientSession, url: str, body: bytes, sent: Sent) -> None:
    clock, add = time.perf_counter, sent.chunks.append
    sent.began = clock()
    try:
        async with session.post(url, data=body) as response:
            if response.status != 200:
                sent.error = f"status {response.status}: {(await response.text())[:200]}"
                return
            async for chunk in response.content.iter_any():
                add((clock(), chunk))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        sent.error = f"{type(error).__name__}: {error}"
    finally:
        sent.ended = clock()


async def run(load: Load, prompts: Sequence[Prompt]) -> Outcome:
    """Send one request for each prompt and read every stream to its end. Failed requests are answers with an error."""
    url = load.url.rstrip("/") + PATHS[load.api]
    bodies = [json.dumps(make_body(load, prompt)).encode() for prompt in prompts]
    sent = [Sent() for _ in prompts]
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if load.api_key:
        headers["Authorization"] = f"Bearer {load.api_key}"
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=load.timeout)
    async with aiohttp.ClientSession(
        connector=connector, read_bufsize=1 << 20, headers=headers, timeout=timeout
    ) as session:
        began = time.perf_counter()
        if load.rate:
            await _poisson(load, session, url, bodies, sent)
        else:
            await _closed_loop(load, session, url, bodies, sent)
        wall = time.perf_counter() - began
    answers = [Answer(error=s.error) if s.error else read_answer(load.api, s.chunks) for s in sent]
    return Outcome(wall, sent, answers)


async def _closed_loop(
    load: Load, session: aiohttp.ClientSession, url: str, bodies: list[bytes], sent: list[Sent]
) -> None:
    left = iter(range(len(bodies)))

    async def client() -> None:
        for i in left:
            await _send(session, url, bodies[i], sent[i])

    await asyncio.gather(*(client() for _ in range(min(load.concurrency, len(bodies)))))


async def _poisson(load: Load, session: aiohttp.ClientSession, url: str, bodies: list[bytes], sent: list[Sent]) -> None:
    async def client(at: float, i: int) -> None:
        await asyncio.sleep(at)
        await _send(session, url, bodies[i], sent[i])

    at = arrivals(load.rate, len(bodies), load.seed)
    await asyncio.gather(*(client(seconds, i) for i, seconds in enumerate(at)))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which requests of a Poisson process arrive; the first at 0."""
    draw, at = random.Random(seed), [0.0]
    while len(at) < count:
        at.append(at[-1] + draw.expovariate(rate))
    return at[:count]


def report(load: Load, outcome: Outcome) -> dict[str, Any]:
    """The figures of a load, for JSON. Times in milliseconds where the name says so."""
    pairs = [(s, a) for s, a in zip(outcome.sent, outcome.answers, strict=True) if a.error is None]
    ttft = [(a.times[0] - s.began) * 1e3 for s, a in pairs]
    itl = [(b - a) * 1e3 for _, answer in pairs for a, b in zip(answer.times, answer.times[1:], strict=False)]
    decode = outcome.decode_rates
    prompt_tokens = [a.prompt_tokens for _, a in pairs if a.prompt_tokens is not None]
    return {
        "api": load.api, "concurrency": None if load.rate else load.concurrency, "rate": load.rate or None,
        "requests": len(outcome.sent), "ok": len(pairs), "errors": outcome.errors(),
        "short_answers": sum(a.tokens < load.output_len for _, a in pairs),
        "prompt_tokens": sum(prompt_tokens) if prompt_tokens else None, "output_tokens": outcome.tokens,
        "tokens_counted_by": "usage" if pairs and all(a.completion_tokens is not None for _, a in pairs) else "events",
        "wall_s": round(outcome.wall, 3), "ttft_ms": summary(ttft), "itl_ms": summary(itl),
        "decode_tokens_per_s": round(percentile(decode, 50), 2) if decode else None,
        "output_tokens_per_s": round(outcome.output_rate, 2),
    }


def main() -> int:
    """The command. Exit status 1 if a request failed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:3000")
    parser.add_argument("--api", choices=get_args(Api), default="completions")
    parser.add_argument("--model", default="model")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.0, help="Poisson arrivals per second; 0 = closed loop")
    parser.add_argument("--input-len", type=int, default=128, help="tokens, about")
    parser.add_argument("--output-len", type=int, default=128, help="tokens")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action="store_true", help="send ignore_eos and min_tokens")
    parser.add_argument("--api-key")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1, help="short requests before the load")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    given = parser.parse_args()
    load = Load(
        given.url, given.api, given.concurrency, given.rate, given.output_len, given.temperature, given.ignore_eos,
        given.model, given.api_key, given.timeout, given.seed,
    )
    prompts: list[Prompt] = [numbered_list(given.input_len, given.seed + i) for i in range(given.requests)]
    if given.warmup:
        uvloop.run(run(replace(load, output_len=8, rate=0.0), prompts[:1] * given.warmup))
    outcome = uvloop.run(run(load, prompts))
    print(json.dumps(report(load, outcome), indent=1))
    return 1 if outcome.errors() else 0


if __name__ == "__main__":
    sys.exit(main())
