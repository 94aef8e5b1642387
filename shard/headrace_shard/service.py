"""headrace.v1.Generation on asyncio: validates, hands calls to the executor, writes their Steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc

from headrace._common.errors import HeadraceError, InvalidRequest, Unhealthy, mapping
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_pb2_grpc as pb_grpc
from headrace_shard import requests as rq
from headrace_shard.calls import Call
from headrace_shard.executor import Delivery, Executor
from headrace_shard.wire import RequestReader, step_message

Context: TypeAlias = Any  # grpc.aio.ServicerContext; grpcio has no types
log = logging.getLogger(__name__)


class Deliveries:
    """Brings what the executor hands over to the streams that wait for it: one hop between the threads a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[Call, asyncio.Queue[rq.StepResult | HeadraceError]] = {}

    def open(self, call: Call) -> asyncio.Queue[rq.StepResult | HeadraceError]:
        """The queue in which the call's items arrive, until `close`."""
        queue: asyncio.Queue[rq.StepResult | HeadraceError] = asyncio.Queue()
        self._queues[call] = queue
        return queue

    def close(self, call: Call) -> None:
        del self._queues[call]

    def deliver(self, delivery: Delivery) -> None:
        """Called on the executor's thread."""
        self._loop.call_soon_threadsafe(self._dispatch, delivery)

    def _dispatch(self, delivery: Delivery) -> None:
        for call, item in delivery:
            if call in self._queues:  # else the client is gone
                self._queues[call].put_nowait(item)


class GenerationService(pb_grpc.GenerationServicer):
    """The service of the leading rank."""

    def __init__(
        self, executor: Executor, deliveries: Deliveries, reader: RequestReader, info: pb.InfoResponse,
        warmup: pb.WarmupResponse,
    ) -> None:
        self._executor, self._deliveries, self._reader = executor, deliveries, reader
        self._info, self._warmup = info, warmup
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        return self._info

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        trouble = self._executor.trouble()
        if trouble:
            await abort(context, Unhealthy(trouble.reason))
        return pb.HealthResponse()

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        return self._warmup

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> None:  # type: ignore[override]
        try:
            if not request.requests:
                raise InvalidRequest("requests is empty: a Prefill brings at least one request", "requests")
            requests = await self._read(request.requests)
        except HeadraceError as error:
            await abort(context, error)
        call = Call(
            request.owner, (request.batch_id,), tuple(requests), max_step_tokens=request.max_step_tokens,
            itl_target=request.itl_target_ms / 1e3,
        )
        await self._stream(call, context)

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> None:  # type: ignore[override]
        call = Call(
            request.owner, tuple(request.batch_ids), max_steps=request.max_steps,
            max_step_tokens=request.max_step_tokens, itl_target=request.itl_target_ms / 1e3,
        )
        await self._stream(call, context)

    async def Filter(self, request: pb.FilterRequest, context: Context) -> pb.FilterResponse:
        future = self._executor.filter(request.batch_id, request.owner, list(request.request_ids))
        return pb.FilterResponse(running=await self._answer(future, context))

    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearResponse:
        future = self._executor.clear(request.batch_id, request.owner)
        return pb.ClearResponse(cleared=await self._answer(future, context))

    async def _read(self, messages: Sequence[pb.Request]) -> list[rq.Request]:
        if not any(m.WhichOneof("input") == "text" for m in messages):
            return [self._reader.read(m) for m in messages]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, lambda: [self._reader.read(m) for m in messages])

    async def _answer(self, future: Future[int], context: Context) -> int:
        try:
            return await asyncio.wrap_future(future)
        except HeadraceError as error:
            await abort(context, error)
            raise

    async def _stream(self, call: Call, context: Context) -> None:
        """Write the call's Steps until its end; a client that goes away cancels it."""
        trouble = self._executor.trouble()
        if trouble and trouble.kind != "hung":
            await abort(context, Unhealthy(trouble.reason))
        queue = self._deliveries.open(call)
        self._executor.submit(call)
        ended = False
        try:
            # Tells the client that the call has its place in the order of calls: its next one may follow.
            await context.send_initial_metadata(())
            while not ended:
                item = await queue.get()
                if isinstance(item, HeadraceError):
                    ended = True
                    await abort(context, item)
                    return
                ended = item.end != rq.RUNNING
                await context.write(step_message(item))
                blocked = call.blocked
                call.delivered += 1
                if blocked:
                    self._executor.wake()
        finally:
            self._deliveries.close(call)
            if not ended:
                self._executor.cancel(call)


async def abort(context: Context, error: HeadraceError) -> None:
    """End the call with the status that the table gives this error. Does not return."""
    await context.abort(grpc.StatusCode[mapping(error).grpc], str(error))
