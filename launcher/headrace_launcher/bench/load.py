"""The client: streams requests, in a closed loop or as they arrive, and keeps what came and when."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from headrace_launcher.bench.events import Answer, Api, Chunk, read_answer

Prompt = str | list[int]  # text, or token ids (completions only)
PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "tgi": "/generate_stream"}


WATCH_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """One request. `at`: seconds after the start at which it arrives; None: when a place of the closed loop gets free.

    `workload` (its class) and `deadline` (seconds from its start to its end) are sent along as headers, which other servers
    do not look at. `tenant`: the number of its key among the load's.
    """

    prompt: Prompt
    output_len: int
    workload: str = ""
    at: float | None = None
    tenant: int = 0
    deadline: float | None = None


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
    api_keys: tuple[str, ...] = ()  # of one tenant, or of several
    timeout: float = 600.0  # seconds for one request
    seed: int = 1  # of the arrival times


@dataclass
class Sent:
    """One request on its way; times are of time.perf_counter(), 0: not yet."""

    began: float = 0.0
    ended: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    error: str | None = None
    whole: bool = False  # its stream was read to the end


@dataclass(frozen=True)
class Outcome:
    """What a load gave. Times are in seconds."""

    wall: float
    sent: list[Sent]
    answers: list[Answer]
    began: float = 0.0  # of time.perf_counter()
    cpu: float = 0.0  # that the client itself took

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


def make_body(load: Load, prompt: Prompt, output_len: int | None = None) -> dict[str, Any]:
    """The JSON body of one request, of `load.output_len` tokens if nothing else is said.

    Raises:
        ValueError: token ids for an API that takes none.
    """
    most = load.output_len if output_len is None else output_len
    if load.api == "tgi":
        _need_text(prompt)
        parameters: dict[str, Any] = {"max_new_tokens": most, "details": True}
        if load.temperature > 0:
            parameters |= {"do_sample": True, "temperature": load.temperature}
        return {"inputs": prompt, "parameters": parameters, "stream": True}
    body: dict[str, Any] = {
        "model": load.model, "max_tokens": most, "temperature": load.temperature, "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body |= {"ignore_eos": True, "min_tokens": most}
    if load.api == "completions":
        return {**body, "prompt": prompt}
    _need_text(prompt)
    return {**body, "messages": [{"role": "user", "content": prompt}]}


def _need_text(prompt: Prompt) -> None:
    if not isinstance(prompt, str):
        raise ValueError("only completions takes token ids")


def make_headers(load: Load, job: Job) -> dict[str, str]:
    """What a request says of itself besides its body."""
    headers = {"Authorization": f"Bearer {load.api_keys[job.tenant]}"} if load.api_keys else {}
    if job.workload:
        headers["X-Headrace-Class"] = job.workload
    if job.deadline is not None:
        headers["X-Request-Timeout-Ms"] = str(max(round(job.deadline * 1e3), 1))
    return headers


async def _send(session: aiohttp.ClientSession, url: str, headers: dict[str, str], body: bytes, sent: Sent) -> None:
    clock, add = time.perf_counter, sent.chunks.append
    sent.began = clock()
    try:
        async with session.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                sent.error = f"status {response.status}: {(await response.text())[:200]}"
                return
            async for chunk in response.content.iter_any():
                add((clock(), chunk))
        sent.whole = True
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        sent.error = f"{type(error).__name__}: {error}"
    finally:
        sent.ended = clock()


async def run(load: Load, prompts: Sequence[Prompt]) -> Outcome:
    """Send one request for each prompt, in a closed loop or at the load's rate; see `run_jobs`."""
    times = arrivals(load.rate, len(prompts), load.seed) if load.rate else [None] * len(prompts)
    return await run_jobs(load, [Job(p, load.output_len, at=at) for p, at in zip(prompts, times, strict=True)])


async def run_jobs(load: Load, jobs: Sequence[Job], watch: Callable[[list[Sent]], bool] | None = None) -> Outcome:
    """Send the jobs and read every stream to its end. Failed requests are answers with an error. `watch` is shown the
    state of affairs now and then; if it answers True, what has not ended by then is given up.
    """
    url = load.url.rstrip("/") + PATHS[load.api]
    bodies = [json.dumps(make_body(load, job.prompt, job.output_len)).encode() for job in jobs]
    sent = [Sent() for _ in jobs]
    headers = [make_headers(load, job) for job in jobs]
    async with client(load) as session:
        began, cpu = time.perf_counter(), time.process_time()

        async def timed(i: int, at: float) -> None:
            await asyncio.sleep(began + at - time.perf_counter())
            await _send(session, url, headers[i], bodies[i], sent[i])

        async def places(left: list[int]) -> None:
            while left:
                i = left.pop()
                await _send(session, url, headers[i], bodies[i], sent[i])

        loop = [i for i, job in enumerate(jobs) if job.at is None][::-1]
        everything = asyncio.gather(
            *(timed(i, job.at) for i, job in enumerate(jobs) if job.at is not None),
            *(places(loop) for _ in range(min(load.concurrency, len(loop)))),
        )
        await _watch(everything, watch, sent)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    answers = [Answer(error=s.error) if s.error else read_answer(load.api, s.chunks) for s in sent]
    return Outcome(wall, sent, answers, began, cpu)


@asynccontextmanager
async def client(load: Load) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with the load's key and limits, and a connection for each request."""
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if load.api_keys:
        headers["Authorization"] = f"Bearer {load.api_keys[0]}"
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=load.timeout)
    async with aiohttp.ClientSession(
        connector=connector, read_bufsize=1 << 20, headers=headers, timeout=timeout
    ) as session:
        yield session


async def find_model(load: Load) -> str:
    """The id of the first model that the server names; "model" if it names none."""
    try:
        async with client(load) as session, session.get(load.url.rstrip("/") + "/v1/models") as response:
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError):
        return "model"


async def _watch(everything: asyncio.Future[Any], watch: Callable[[list[Sent]], bool] | None, sent: list[Sent]) -> None:
    """Wait for all requests, or until whoever watches gives them up."""
    while watch is not None and not everything.done():
        if watch(sent):
            everything.cancel()
            await asyncio.gather(everything, return_exceptions=True)
            for one in sent:
                one.error = one.error or (None if one.whole else "given up")
            return
        await asyncio.wait([everything], timeout=WATCH_SECONDS)
    await everything


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which requests of a Poisson process arrive; the first at 0."""
    draw, at = random.Random(seed), [0.0]
    while len(at) < count:
        at.append(at[-1] + draw.expovariate(rate))
    return at[:count]
