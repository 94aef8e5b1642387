"""The loop between the queue and one shard group.

One step in order:

1. `submit` makes an `Entry`, puts it into the queue and wakes `_schedule`.
2. `_schedule` tells the shard who has left (`_filter`), then takes as many waiting requests as there are places and
   sends them with Prefill, the next Decode right behind it (`_admit`): the device never waits for the router. It is
   the only sender, and waits until the shard has taken a call before it makes the next one (`_send`): calls travel
   on streams of their own, which may overtake each other.
3. `_read` reads the calls in the order in which they were made, each to its end.
4. `_dispatch` turns the packed columns of each Step into tokens: detokenize, look for stop strings, put into the
   stream of the request. Who is preempted goes back to the head of the queue.
5. `_after` says what follows when a call ends; see there.

All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable

import grpc
import grpc.aio

from headrace._common.errors import GenerationFailed, InvalidRequest
from headrace._common.tokenizing import Tokenizer
from headrace.v1 import generation_pb2 as pb
from headrace_router.calls import Call
from headrace_router.dispatch import StepDetails, send_last, send_token
from headrace_router.entry import Entry
from headrace_router.limits import Limits
from headrace_router.metrics import Metrics
from headrace_router.roster import Room, Roster
from headrace_router.shard_client import ShardClient
from headrace_router.streams import TokenStream
from headrace_router.tenants import Tenant
from headrace_router.text.output import OutputText
from headrace_router.types import GenerateRequest

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.25  # between tries while others hold the room
FILTER_SECONDS = 5.0
NO_LIMIT = sys.maxsize


class Batcher:
    """Runs requests in one continuously changing batch of a shard group."""

    def __init__(
        self, shard: ShardClient, tokenizer: Tokenizer, limits: Limits, metrics: Metrics, max_step_tokens: int = 0,
        itl_target_ms: int = 0, shard_restarts: bool = False,
    ) -> None:
        """`max_step_tokens`: token budget of a step, 0 = the shard's own. `itl_target_ms`: how long steps with running
        streams should take, 0 = no matter. `shard_restarts`: a dead shard comes back.
        """
        self._shard = shard
        self._tokenizer = tokenizer
        self._limits = limits
        self._metrics = metrics
        self._pacing = {"max_step_tokens": max_step_tokens, "itl_target_ms": itl_target_ms}
        self._shard_restarts = shard_restarts
        self._owner = secrets.token_hex(8)
        self._roster = Roster()
        self._calls: deque[Call] = deque()
        self._batch_id = 0  # 0: there is no batch
        self._admitting = False  # a Prefill is on its way whose outcome is unknown
        self._decode_due = False  # the batch has no call that runs it on
        self._free_blocks: int | None = None  # of the shard, at the last step; None: it does not say
        self._most = NO_LIMIT  # requests to send at once; halved when the shard has no room for so many
        self._blocked = False  # the shard has no room for one more
        self._retry: asyncio.TimerHandle | None = None
        self._last_arrival = 0
        self._closed: str | None = None  # why nothing is taken any more
        self._wake = asyncio.Event()
        self._called = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # --- the engine's interface ---

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Queue a request; a closed batcher fails it at once."""
        self._last_arrival += 1
        text = OutputText.of(self._tokenizer, request)
        stream = TokenStream(lambda: self._cancel(entry))
        entry = Entry(request, self._last_arrival, text, stream)
        entry.output.extend(request.generated)
        if self._closed is not None:
            stream.fail(GenerationFailed(self._closed))
            return stream
        self._roster.queue.push(entry)
        self._wake.set()
        return stream

    def start(self) -> list[asyncio.Task[None]]:
        """Start the two tasks. They never end by themselves: one that does has failed."""
        self._tasks = [
            asyncio.create_task(self._schedule(), name="batcher-schedule"),
            asyncio.create_task(self._read(), name="batcher-read"),
        ]
        return self._tasks

    async def close(self, reason: str) -> None:
        """Fail what runs and waits, free the batch and stop."""
        self._closed = reason
        for task in self._tasks:
            task.cancel()
        self._roster.fail([*self._roster.running.values(), *self._roster.queue], GenerationFailed(reason))
        try:
            await self._shard.stub.Clear(pb.ClearRequest(owner=self._owner), timeout=1.0)
        except grpc.aio.AioRpcError as error:
            log.debug("Clear at the end: %s", error.code().name)
        calls = list(self._calls)
        self._calls.clear()
        for call in calls:
            call.rpc.cancel()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._roster.queue)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the requests in the queue may take."""
        return self._roster.queue.tokens

    def wait(self, workload: str, tenant: Tenant) -> float:
        """Seconds that a new request will be in the queue, if it has to wait at all."""
        return self._roster.queue.wait(workload, tenant)

    @property
    def backlog(self) -> int:
        """Requests in the queue beyond those that the next admission has places for."""
        full = self._blocked or not self._roster.may_admit("document")
        places = 0 if full else self._limits.max_batch_size - self.running
        return self.waiting - max(places, 0)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._roster.running)

    @property
    def free_tokens(self) -> int | None:
        """KV tokens that nobody holds, by the last step; None: that is not known now."""
        if not self.running:
            return self._shard.capacity.max_batch_total_tokens
        return None if self._free_blocks is None else self._free_blocks * self._shard.info.block_size

    @property
    def running_tokens(self) -> int:
        """Tokens that the running requests may grow to."""
        return self._roster.running_tokens

    # --- leaving ---

    def _cancel(self, entry: Entry) -> None:
        """The reader of a stream is gone."""
        if entry.wire_id in self._roster.running:
            self._leave(entry.wire_id)
        else:
            self._roster.queue.forget(entry, len(entry.request.prompt) + len(entry.output) if entry.output else 0)

    def _leave(self, wire_id: int) -> None:
        """A request ends on this side while the shard still runs it."""
        self._roster.leave(wire_id)
        self._wake.set()

    # --- sending ---

    async def _schedule(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not self._admitting:  # else its outcome wakes us
                if self._roster.leaving:
                    await self._filter()
                if len(self._roster.queue) and not self._blocked:
                    await self._admit()
            if self._decode_due:
                await self._decode()

    async def _send(self, call: Call) -> None:
        """Have a call read, in its turn, and wait until the shard has taken it: that is its initial metadata, which
        comes at once, or with the first Step, or with an error.
        """
        self._calls.append(call)
        self._called.set()
        await call.rpc.initial_metadata()

    async def _filter(self) -> None:
        """Free the requests that have left. The answer is awaited: a Prefill sent now could overtake the Filter."""
        batch_id, gone, keep = self._batch_id, set(self._roster.leaving), list(self._roster.running)
        stub, begun = self._shard.stub, time.perf_counter()
        try:
            if batch_id and keep:
                filter_request = pb.FilterRequest(batch_id=batch_id, owner=self._owner, request_ids=keep)
                await stub.Filter(filter_request, timeout=FILTER_SECONDS)
            elif batch_id:
                await stub.Clear(pb.ClearRequest(batch_id=batch_id, owner=self._owner), timeout=FILTER_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                log.warning("the shard does not free requests that have left: %s", error.code().name)
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._wake.set)
                return
        if not keep and self._batch_id == batch_id:
            self._batch_id = 0
        self._metrics.batch_filter_duration["decode"].observe(time.perf_counter() - begun)
        self._roster.leaving -= gone
        self._unblock()

    def _unblock(self) -> None:
        self._blocked = False
        self._free_blocks = None  # there may be more by now
        self._wake.set()

    def _block(self) -> None:
        self._blocked = True
        if self._retry is not None:
            self._retry.cancel()
        self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._unblock)

    async def _admit(self) -> None:
        """Send waiting requests to the shard, no more than there are places."""
        roster = self._roster
        places = self._limits.max_batch_size - len(roster.running) - len(roster.leaving)
        room = Room(self._shard.info.block_size, self._free_blocks if self._batch_id else None)
        entries = roster.admit(min(places, self._most), room, time.perf_counter())
        if not entries:
            if places > 0 and room.lacking:
                self._block()
            return
        request = pb.PrefillRequest(
            batch_id=self._batch_id, owner=self._owner, requests=[entry.to_wire() for entry in entries],
            **self._pacing,
        )
        self._admitting = True
        await self._send(Call("prefill", self._batch_id, self._shard.stub.Prefill(request), entries))
        # The running call goes on if the Prefill is refused; with a Decode behind, it yields and the refusal is read.
        self._decode_due = True

    async def _decode(self) -> None:
        """Send the call that runs the batch until all have ended, unless there is one, or nothing to run."""
        self._decode_due = False
        if not self._batch_id or (self._calls and self._calls[-1].method == "decode"):
            return
        request = pb.DecodeRequest(batch_ids=[self._batch_id], owner=self._owner, **self._pacing)
        await self._send(Call("decode", self._batch_id, self._shard.stub.Decode(request), []))

    # --- reading ---

    async def _read(self) -> None:
        while True:
            while not self._calls:
                self._called.clear()
                await self._called.wait()
            call = self._calls[0]
            end, error = pb.Step.END_UNSPECIFIED, None
            try:
                while (step := await call.rpc.read()) is not grpc.aio.EOF:
                    self._dispatch(step, call)
                    end = step.end
            except grpc.aio.AioRpcError as failure:
                error = failure
            self._calls.popleft()
            self._after(call, end, error)

    def _dispatch(self, step: pb.Step, call: Call) -> None:
        """Hand out the tokens of one step."""
        if not call.confirmed:
            self._confirm(call, step)
        running, special, columns = self._roster.running, self._tokenizer.special_ids, step.intermediates
        rows = zip(columns.request_id, columns.token_id, columns.logprob, strict=True)
        details = StepDetails(step) if step.details else None
        for wire_id, token_id, logprob in rows:
            detail = details.next(wire_id) if details is not None else None
            entry = running.get(wire_id)
            if entry is None:
                continue  # has left here
            if detail is not None and detail.is_last:
                send_last(entry, token_id, logprob, token_id in special, detail)
                self._roster.finish(wire_id)
            elif send_token(entry, token_id, logprob, token_id in special, detail):
                self._leave(wire_id)
        for told in step.details:
            if told.is_end:
                self._end_rest(told)
        if step.preempted:
            self._requeue(step.preempted)
        if step.cache.blocks:
            self._free_blocks = step.cache.free_blocks
            self._metrics.prefix_cache_queried_tokens = step.cache.queried_tokens
            self._metrics.prefix_cache_hit_tokens = step.cache.hit_tokens
        self._roster.prompts.step()
        if len(self._roster.queue):
            self._wake.set()
        self._count(step, call)

    def _end_rest(self, detail: pb.Detail) -> None:
        """A request has ended in the shard: free its place, and fail it if its last token did not come with that."""
        entry = self._roster.finish(detail.request_id)
        if entry is not None:
            self._roster.fail([entry], GenerationFailed(detail.message or "the request ended without its last token"))
        self._unblock()

    def _requeue(self, preempted: Iterable[int]) -> None:
        """Requests have lost their place to others; they go on from where they were when there is room again."""
        self._roster.queue.push_head(self._roster.take_back(preempted))
        self._block()

    def _count(self, step: pb.Step, call: Call) -> None:
        metrics, method = self._metrics, call.method
        metrics.batch_inference_count[method] += 1
        metrics.drafted(step.timings)
        metrics.batch_inference_success[method] += 1
        metrics.batch_inference_duration[method].observe(step.timings.total_us * 1e-6)
        metrics.batch_forward_duration[method].observe(step.timings.forward_us * 1e-6)
        metrics.batch_decode_duration[method].observe(step.timings.sample_us * 1e-6)
        rows = step.intermediates.request_id
        if step.timings.accepted_tokens:
            for tokens in Counter(rows).values():
                metrics.skipped_tokens.observe(tokens - 1)
        else:
            metrics.skipped_tokens.observe(0, len(rows))

    def _confirm(self, call: Call, step: pb.Step) -> None:
        """The first Step of a call: a Prefill's requests are in the batch, whose id is known now."""
        call.confirmed = True
        if call.method == "prefill":
            self._metrics.batch_next_size.observe(len(call.entries))
            if call.batch_id:
                self._metrics.batch_concat["chunking"] += 1
                self._metrics.batch_concat_duration["decode"].observe(time.perf_counter() - call.sent)
            self._batch_id = step.batch_id
            self._admitting, self._most = False, NO_LIMIT
            self._decode_due = step.running > 0
            self._wake.set()

    # --- the end of a call ---

    def _after(self, call: Call, end: int, error: grpc.aio.AioRpcError | None) -> None:
        """A call has ended, by its last Step's `end` or by an error.

        Calls behind it go on with the batch. Without one, a batch that may go on gets a new Decode, and one that is
        gone while requests have not ended is lost: they are admitted again, from the router's own record.
        """
        if error is not None:
            self._metrics.batch_inference_failure[call.method] += 1
            self._broken(call, error)
        if call.method == "prefill" and not call.confirmed:
            self._admitting = False
        self._wake.set()
        if self._calls:
            return
        if error is not None:
            gone = error.code() is grpc.StatusCode.NOT_FOUND
        else:
            gone = end == pb.Step.END_UNSPECIFIED or (call.method == "decode" and end == pb.Step.FINISHED)
        if gone:
            self._lost_batch()
        elif self._roster.running:
            self._decode_due = True
        elif not self._roster.leaving:  # else these are to be freed yet
            self._batch_id = 0

    def _broken(self, call: Call, error: grpc.aio.AioRpcError) -> None:
        """A call has ended with an error."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._shard.report(f"{call.method} broke off")
            self._lose_shard(f"the shard is gone: {error.details()}")
        elif not call.confirmed and call.method == "prefill":
            self._refused(call, error)
        elif error.code() is not grpc.StatusCode.NOT_FOUND:
            self._give_up(error)

    def _refused(self, call: Call, error: grpc.aio.AioRpcError) -> None:
        """A Prefill was refused as a whole; nothing of it is in the batch."""
        roster, code, alone = self._roster, error.code(), len(call.entries) == 1
        entries = roster.take_back([entry.wire_id for entry in call.entries])
        for entry in entries:
            entry.admitted = entry.admitted if entry.output else None
        if code is grpc.StatusCode.NOT_FOUND and call.batch_id:
            self._lost_batch()  # mostly it has only ended while we asked to join it
            roster.queue.push_head(entries)
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            roster.queue.push_head(entries)
            if alone:
                self._block()
            else:
                self._most = max(1, len(call.entries) // 2)
        elif code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS) and not alone:
            for entry in entries:
                entry.alone = True
            roster.queue.push_head(entries)
        elif code is grpc.StatusCode.INVALID_ARGUMENT:
            roster.fail(entries, InvalidRequest(f"{error.details()}"))
        else:
            roster.fail(entries, GenerationFailed(f"{error.details()}"))

    def _lose_shard(self, reason: str) -> None:
        """The shard is gone, and with it whatever ran. If it comes back, the requests go on from the own record."""
        self._batch_id, self._free_blocks = 0, None
        entries = self._roster.take_all_back()
        if self._shard_restarts:
            self._roster.queue.push_head(entries)
            self._block()
        else:
            self._roster.fail(entries, GenerationFailed(reason))

    def _give_up(self, error: grpc.aio.AioRpcError) -> None:
        """A call has failed within the shard: its requests fail, and whatever is left of them there is freed."""
        entries = dict(self._roster.running)
        log.error("the shard failed: %s: %s", error.code().name, error.details())
        for wire_id in entries:
            self._leave(wire_id)
        self._roster.fail(entries.values(), GenerationFailed(f"{error.details()}"))

    def _lost_batch(self) -> None:
        """There is no batch any more. Requests that have not ended go on from the own record, once each."""
        self._batch_id = 0
        entries = self._roster.take_all_back()
        if not entries:
            return
        again = [entry for entry in entries if not entry.readmitted]
        log.warning("the shard lost a batch of %d requests; %d are admitted again", len(entries), len(again))
        self._roster.fail((e for e in entries if e.readmitted), GenerationFailed("the shard lost the request twice"))
        for entry in again:
            entry.readmitted = True
        self._roster.queue.push_head(again)
