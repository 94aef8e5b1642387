"""The router's own record of one request, from the queue to its terminal event."""

from __future__ import annotations

import time

from headrace.v1 import generation_pb2 as pb
from headrace_router.streams import TokenStream
from headrace_router.tenants import CLASSES, Tenant
from headrace_router.text.output import OutputText
from headrace_router.types import End, FinishReason, GenerateRequest

# what a shard knows of workload classes: the least urgent is the first to be preempted
PRIORITY = {name: len(CLASSES) - 1 - place for place, name in enumerate(CLASSES)}


class Entry:
    """Everything that is needed to run a request, and to run it again elsewhere from where it was."""

    __slots__ = (
        "accepted_tokens", "admitted", "alone", "arrival", "brought", "cached_tokens", "draft_tokens", "output", "passed",
        "readmitted", "request", "stream", "submitted", "text", "wire_id",
    )

    def __init__(self, request: GenerateRequest, arrival: int, text: OutputText, stream: TokenStream) -> None:
        self.request = request
        self.arrival = arrival  # a running number: the order of submission
        self.text = text
        self.stream = stream
        self.output: list[int] = []
        self.wire_id = 0  # of its present admission; never used again
        self.submitted = time.perf_counter()
        self.admitted: float | None = None  # first admission
        self.brought = 0  # tokens of the output that it had at its present admission
        self.cached_tokens = self.draft_tokens = self.accepted_tokens = 0
        self.readmitted = False  # its batch was lost once
        self.passed = 0  # later requests that were admitted before it
        self.alone = False  # was refused in company: goes by itself, so that only the guilty one fails

    @property
    def workload(self) -> str:
        return self.request.workload

    @property
    def tenant(self) -> Tenant:
        return self.request.tenant

    @property
    def cost(self) -> int:
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def ended(self) -> bool:
        return self.stream.done

    @property
    def begun(self) -> bool:
        """It has had a token since its present admission, or has ended."""
        return len(self.output) > self.brought or self.stream.done

    def end(self, reason: FinishReason, now: float) -> End:
        """What the terminal event says. `now`: time.perf_counter()."""
        admitted = self.admitted if self.admitted is not None else now
        return End(
            finish_reason=reason, text=self.text.text, generated_tokens=len(self.output),
            input_length=len(self.request.prompt), seed=self.request.sampling.seed, cached_tokens=self.cached_tokens,
            queue_seconds=admitted - self.submitted, inference_seconds=now - admitted,
            stop_string=self.text.stop_string, draft_tokens=self.draft_tokens, accepted_tokens=self.accepted_tokens,
        )

    def to_wire(self) -> pb.Request:
        """The request as the shard takes it; what it has said already counts as `generated`."""
        request, sampling = self.request, self.request.sampling
        wire = pb.Request(
            id=self.wire_id, token_ids=pb.TokenIds(ids=request.prompt + self.output), generated=len(self.output),
            priority=PRIORITY[request.workload],
            stopping=pb.Stopping(
                max_new_tokens=request.max_new_tokens, min_new_tokens=request.min_new_tokens or None,
                ignore_eos=request.ignore_eos or None, stop_token_ids=request.stop_token_ids,
            ),
            cache_salt=request.tenant.cache_salt,
            sampling=pb.Sampling(
                do_sample=sampling.do_sample or None, seed=sampling.seed, temperature=sampling.temperature,
                top_k=sampling.top_k, top_p=sampling.top_p, typical_p=sampling.typical_p, min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty, frequency_penalty=sampling.frequency_penalty,
                presence_penalty=sampling.presence_penalty, logit_bias=sampling.logit_bias,
                watermark=sampling.watermark or None,
            ),
        )
        if request.top_n_tokens:
            wire.want.top_n_tokens = request.top_n_tokens
        if request.grammar is not None:
            wire.grammar.type, wire.grammar.value = request.grammar.kind, request.grammar.source
        if request.prompt_logprobs and not self.output:
            wire.want.prompt_logprobs = True
            if request.prompt_top_n_tokens:
                wire.want.prompt_top_n_tokens = request.prompt_top_n_tokens
        return wire
