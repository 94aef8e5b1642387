"""A shard without a model, behind the real gRPC contract: it emits scripted tokens, on time, and misbehaves on command.

It keeps the rules of batches that a router can see: joins at step boundaries, takeover by newer calls, Filter, Clear,
owners, preemption, refusals. A step ends at absolute deadlines (start + n * step_seconds), never later by drift.

`python -m tests.fakes.scripted_shard --target unix:PATH` runs it as a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_pb2_grpc

LOGPROB = -0.5
LOWEST, TOKENS, STRIDE = 40, 50, 7  # of the default script
Script = Callable[[pb.Request, int], int]  # (request, index of the output token) -> token id


def cycle(request: pb.Request, index: int) -> int:
    """The default script: printable single-byte tokens that depend on the prompt and go on for ever."""
    ids = request.token_ids.ids
    prompt = sum(ids[: len(ids) - request.generated])
    return LOWEST + (prompt + index * STRIDE) % TOKENS


@dataclass
class Row:
    """A request in a batch."""

    request: pb.Request
    generated: int
    prompt_steps: int  # forward passes until its first token
    begun: bool = False
    plain: bool = False  # it has begun, and none of its tokens but the last has a detail
    id: int = field(init=False)
    most: int = field(init=False)
    first: int = field(init=False)  # the output token of index 0, in the default script

    def __post_init__(self) -> None:
        self.id, self.most = self.request.id, self.request.stopping.max_new_tokens
        self.first = cycle(self.request, 0) - LOWEST


@dataclass(eq=False)
class Call:
    """A Prefill or Decode; `waits_for` are the requests that a Prefill runs until they have begun."""

    batch_id: int
    requests: list[pb.Request]
    is_prefill: bool
    steps: asyncio.Queue[pb.Step | tuple[grpc.StatusCode, str]] = field(default_factory=asyncio.Queue)
    waits_for: set[int] = field(default_factory=set)


@dataclass
class Batch:
    id: int
    owner: str
    rows: dict[int, Row] = field(default_factory=dict)
    calls: deque[Call] = field(default_factory=deque)


class ScriptedShard(generation_pb2_grpc.GenerationServicer):
    """The service, and the levers of a test."""

    def __init__(
        self, *, script: Script = cycle, step_seconds: float = 0.001, vocab_size: int = 400, eos_id: int = 2,
        max_total_tokens: int = 1024, max_batch_size: int = 256, chunk: int = 1 << 30, tokens_per_step: int = 1,
        in_columns: bool = False,
    ) -> None:
        """`chunk`: prompt tokens of a row that one step takes; `tokens_per_step`: of each row, as speculation gives them;
        `in_columns`: rows of the default script that cannot end in a step have their tokens made all at once.
        """
        self.in_columns = in_columns
        self.tokens_per_step = tokens_per_step
        self.script, self.step_seconds, self.vocab_size, self.eos_id = script, step_seconds, vocab_size, eos_id
        self.max_total_tokens, self.max_batch_size, self.chunk = max_total_tokens, max_batch_size, chunk
        self.room = max_batch_size  # rows that fit; fewer than max_batch_size: RESOURCE_EXHAUSTED
        self.poison: int | None = None  # a prompt with this token id is refused
        self.healthy = True
        self.cached_tokens = 0  # of every prompt, as it tells with the first token
        self.guesses = 0, 0  # draft tokens that each request tells of, and how many of them were right
        self.features = ["prompt_logprobs", "grammar"]
        self.batches: dict[int, Batch] = {}
        self.prefills: list[pb.PrefillRequest] = []  # everything that was asked for, in order
        self.refusals = 0
        self.step = 0
        self.most_rows = 0
        self._preempt = 0
        self._last_batch = 0
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None

    # --- life ---

    async def start(self, target: str) -> None:
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        generation_pb2_grpc.add_GenerationServicer_to_server(self, self._server)
        self._server.add_insecure_port(target)
        await self._server.start()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._server is not None:
            await self._server.stop(None)

    @property
    def rows(self) -> int:
        return sum(len(batch.rows) for batch in self.batches.values())

    def preempt(self, count: int) -> None:
        """At the next step, take so many of the youngest requests out of their batch."""
        self._preempt = count

    def lose(self) -> None:
        """Forget every batch, as after an expired lease."""
        self.fail(grpc.StatusCode.NOT_FOUND, "unknown batch")

    def fail(self, code: grpc.StatusCode, details: str, forget: bool = True) -> None:
        """End all calls with an error, and forget every batch."""
        for batch in self.batches.values():
            for call in batch.calls:
                call.steps.put_nowait((code, details))
            batch.calls.clear()
        if forget:
            self.batches.clear()

    # --- the service ---

    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.InfoResponse:
        return pb.InfoResponse(
            model_id="scripted", dtype="float32", device="cpu", world_size=1, leader=True, vocab_size=self.vocab_size,
            eos_token_ids=[self.eos_id], max_input_tokens=self.max_total_tokens - 1,
            max_total_tokens=self.max_total_tokens, max_batch_size=self.max_batch_size, max_step_tokens=256,
            block_size=16, blocks=1000, features=self.features, contract_version="1",
        )

    async def Health(self, request: pb.HealthRequest, context: grpc.aio.ServicerContext) -> pb.HealthResponse:
        if not self.healthy:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "told to be ill")
        return pb.HealthResponse()

    async def Warmup(self, request: pb.WarmupRequest, context: grpc.aio.ServicerContext) -> pb.WarmupResponse:
        return pb.WarmupResponse(max_batch_total_tokens=16000, explanation="scripted", slowest_step_seconds=0.001)

    async def Prefill(self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.Step]:
        self.prefills.append(request)
        if request.batch_id:
            batch = await self._find(request.batch_id, request.owner, context)
        if any(self.poison in r.token_ids.ids for r in request.requests):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a poisoned prompt")
        pending = sum(len(call.requests) for b in self.batches.values() for call in b.calls)
        if self.rows + pending + len(request.requests) > min(self.room, self.max_batch_size):
            self.refusals += 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        if not request.batch_id:
            self._last_batch += 1
            batch = self.batches[self._last_batch] = Batch(self._last_batch, request.owner)
        ids = [r.id for r in request.requests]
        if len(set(ids)) < len(ids) or set(ids) & set(batch.rows):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "a request id is used twice")
        async for step in self._call(batch, Call(batch.id, list(request.requests), True), context):
            yield step

    async def Decode(self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.Step]:
        batch = await self._find(request.batch_ids[0], request.owner, context)
        async for step in self._call(batch, Call(batch.id, [], False), context):
            yield step

    async def Filter(self, request: pb.FilterRequest, context: grpc.aio.ServicerContext) -> pb.FilterResponse:
        batch = await self._find(request.batch_id, request.owner, context)
        for request_id in set(batch.rows) - set(request.request_ids):
            del batch.rows[request_id]
        self._free_if_empty(batch)
        return pb.FilterResponse(running=len(batch.rows))

    async def Clear(self, request: pb.ClearRequest, context: grpc.aio.ServicerContext) -> pb.ClearResponse:
        if request.batch_id:
            found = [await self._find(request.batch_id, request.owner, context)]
        else:
            found = [batch for batch in self.batches.values() if batch.owner == request.owner]
        for batch in found:
            batch.rows.clear()
            self._free_if_empty(batch)
        return pb.ClearResponse(cleared=len(found))

    async def _find(self, batch_id: int, owner: str, context: grpc.aio.ServicerContext) -> Batch:
        batch = self.batches.get(batch_id)
        if batch is None or batch.owner != owner:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"batch {batch_id} is unknown")
            raise AssertionError
        return batch

    async def _call(self, batch: Batch, call: Call, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.Step]:
        batch.calls.append(call)
        self._work.set()
        try:
            await context.send_initial_metadata(())
            while True:
                step = await call.steps.get()
                if isinstance(step, tuple):
                    await context.abort(*step)
                    return
                yield step
                if step.end:
                    return
        finally:
            with contextlib.suppress(ValueError):
                batch.calls.remove(call)

    # --- the steps ---

    async def _run(self) -> None:
        while True:
            if not any(batch.calls for batch in self.batches.values()):
                self._work.clear()
                await self._work.wait()
            deadline = time.perf_counter()
            while any(batch.calls for batch in self.batches.values()):
                deadline += self.step_seconds
                await asyncio.sleep(max(0.0, deadline - time.perf_counter()))
                self.step += 1
                self.most_rows = max(self.most_rows, self.rows)
                for batch in list(self.batches.values()):
                    if batch.calls:
                        self._step(batch)

    def _step(self, batch: Batch) -> None:
        call = batch.calls[0]
        for request in call.requests:
            size = len(request.token_ids.ids)
            batch.rows[request.id] = Row(request, request.generated, (size + self.chunk - 1) // self.chunk)
            call.waits_for.add(request.id)
        call.requests = []
        step = pb.Step(batch_id=batch.id, step=self.step)
        for row in self._advance_plain(batch, step):
            for _ in range(self.tokens_per_step):
                if row.request.id in batch.rows:
                    self._advance(batch, row, step)
        while self._preempt and batch.rows:
            self._preempt -= 1
            request_id = max(batch.rows)
            del batch.rows[request_id]
            step.preempted.append(request_id)
        step.running = len(batch.rows)
        step.timings.total_us = step.timings.forward_us = round(self.step_seconds * 1e6)
        waiting = {i for i in call.waits_for if i in batch.rows and not batch.rows[i].begun}
        if (not batch.rows and len(batch.calls) == 1) or (call.is_prefill and not waiting):
            step.end = pb.Step.FINISHED
        elif len(batch.calls) > 1:
            step.end = pb.Step.YIELDED
        if step.end:
            batch.calls.popleft()
        call.steps.put_nowait(step)
        if not batch.rows and not any(c.requests for c in batch.calls):
            self._free_if_empty(batch)

    def _advance_plain(self, batch: Batch, step: pb.Step) -> list[Row]:
        """One token of each row that cannot end with it, column by column; returns the other rows."""
        if not self.in_columns or self.script is not cycle or self.tokens_per_step > 1:
            return list(batch.rows.values())
        rest = [row for row in batch.rows.values() if not row.plain or row.generated + 1 >= row.most]
        rows = [row for row in batch.rows.values() if row.plain and row.generated + 1 < row.most]
        columns = step.intermediates
        columns.request_id.extend([row.id for row in rows])
        columns.token_id.extend([LOWEST + (row.first + row.generated * STRIDE) % TOKENS for row in rows])
        columns.logprob.extend([LOGPROB] * len(rows))
        for row in rows:
            row.generated += 1
        return rest

    def _advance(self, batch: Batch, row: Row, step: pb.Step) -> None:
        request = row.request
        row.prompt_steps -= 1
        if row.prompt_steps > 0:
            return
        token_id = self.script(request, row.generated)
        row.generated += 1
        step.intermediates.request_id.append(request.id)
        step.intermediates.token_id.append(token_id)
        step.intermediates.logprob.append(LOGPROB)
        if token_id == self.eos_id and not request.stopping.ignore_eos:
            reason = pb.Detail.EOS_TOKEN
        elif token_id in request.stopping.stop_token_ids:
            reason = pb.Detail.STOP_TOKEN
        elif row.generated >= request.stopping.max_new_tokens:
            reason = pb.Detail.LENGTH
        else:
            reason = pb.Detail.UNFINISHED
        cached = 0 if row.begun else self.cached_tokens
        if reason or cached or request.HasField("want"):
            detail = step.details.add(
                request_id=request.id, is_end=bool(reason), finish_reason=reason, seed=request.sampling.seed,
                cached_tokens=cached,
                prompt_tokens=len(request.token_ids.ids) - request.generated, generated_tokens=row.generated,
                draft_tokens=self.guesses[0], accepted_tokens=self.guesses[1],
            )
            if count := request.want.top_n_tokens:
                top = [token_id, *(i for i in range(40, 41 + count) if i != token_id)][:count]
                detail.top.add(token_id=top, logprob=[LOGPROB - i for i in range(count)])
            if request.want.prompt_logprobs and not row.begun:
                ids = request.token_ids.ids
                detail.prompt_logprobs.token_id.extend(ids)
                detail.prompt_logprobs.logprob.extend([float("nan"), *(-1.0 for _ in ids[1:])])
                if most := request.want.prompt_top_n_tokens:
                    detail.prompt_logprobs.top.add()
                    for _ in ids[1:]:
                        detail.prompt_logprobs.top.add(token_id=range(50, 50 + most), logprob=[-0.1] * most)
        row.begun = True
        row.plain = not request.HasField("want") and not request.stopping.stop_token_ids and self.eos_id < LOWEST
        if reason:
            del batch.rows[request.id]

    def _free_if_empty(self, batch: Batch) -> None:
        if batch.rows:
            return
        self.batches.pop(batch.id, None)
        for place, call in enumerate(list(batch.calls)):
            if place == 0 and not call.requests:
                call.steps.put_nowait(pb.Step(batch_id=batch.id, step=self.step, end=pb.Step.FINISHED))
            else:
                call.steps.put_nowait((grpc.StatusCode.NOT_FOUND, f"batch {batch.id} is unknown"))
        batch.calls.clear()


async def _main(target: str, **options: Any) -> None:
    shard = ScriptedShard(**options)
    await shard.start(target)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="unix:PATH or HOST:PORT")
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--tokens-per-step", type=int, default=1, help="of each request")
    parser.add_argument("--max-batch-size", type=int, default=256)
    arguments = parser.parse_args()
    asyncio.run(_main(
        arguments.target, step_seconds=arguments.step_ms / 1000, tokens_per_step=arguments.tokens_per_step,
        max_batch_size=arguments.max_batch_size, in_columns=True,
    ))
