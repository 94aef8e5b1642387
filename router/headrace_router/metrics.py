"""Metrics under TGI's names: plain numbers in the hot path, rendered as text when scraped."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.v1 import generation_pb2 as pb

DURATIONS = tuple(0.0001 * 1.5**k for k in range(1, 36))  # seconds
SIZES = tuple(float(n) for n in range(1, 1025))
DRAFTS = tuple(float(n) for n in range(17))
METHODS = ("prefill", "decode")
GUESSES = ("lookup", "model")
JOINING = ("backpressure", "wait_exceeded", "chunking")  # TGI's reasons; requests join a batch by chunks here
FAILURES = (
    "overloaded", "validation", "incomplete", "generation", "dropped", "template", "unhealthy", "rate_limited", "timeout",
)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def linear(top: int) -> tuple[float, ...]:
    """100 equal buckets up to `top`."""
    return tuple(top * k / 100 for k in range(1, 101))


class Histogram:
    """Counts of observations in buckets; bounds are inclusive upper ones."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> Iterable[str]:
        seen = 0
        comma = "," if labels else ""
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            seen += count
            edge = "+Inf" if bound is None else f"{bound:.9g}"
            yield f'{name}_bucket{{{labels}{comma}le="{edge}"}} {seen}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braces} {self.total:.9g}"
        yield f"{name}_count{braces} {seen}"


@dataclass(frozen=True)
class Gauges:
    """Where the true state is read at scrape time."""

    queue_size: Callable[[], int]
    queue_tokens: Callable[[], int]
    batch_size: Callable[[], int]
    batch_tokens: Callable[[], int]
    max_batch_total_tokens: int


class Metrics:
    """All numbers of one router."""

    def __init__(self, max_input_tokens: int, max_total_tokens: int) -> None:
        self.request_count = 0
        self.request_success = 0
        self.request_failure = dict.fromkeys(FAILURES, 0)
        self._refused: Counter[tuple[str, str, str]] = Counter()  # by tenant, class, reason
        self._late: Counter[tuple[str, str, str]] = Counter()  # by tenant, class, stage
        self._prompt_tokens: Counter[str] = Counter()  # by tenant
        self._generated_tokens: Counter[str] = Counter()
        self.request_duration = Histogram(DURATIONS)
        self.validation_duration = Histogram(DURATIONS)
        self.queue_duration = Histogram(DURATIONS)
        self.inference_duration = Histogram(DURATIONS)
        self.time_per_token = Histogram(DURATIONS)
        self.generated_tokens = Histogram(linear(max_total_tokens))
        self.max_new_tokens = Histogram(linear(max_total_tokens))
        self.input_length = Histogram(linear(max_input_tokens))
        self.skipped_tokens = Histogram(DRAFTS)
        self.prefix_cache_queried_tokens = 0
        self.prefix_cache_hit_tokens = 0
        self._draft_tokens = dict.fromkeys(GUESSES, 0)
        self._accepted_draft_tokens = dict.fromkeys(GUESSES, 0)
        self.batch_next_size = Histogram(SIZES)
        self.batch_inference_count = dict.fromkeys(METHODS, 0)
        self.batch_inference_success = dict.fromkeys(METHODS, 0)
        self.batch_inference_failure = dict.fromkeys(METHODS, 0)
        self.batch_inference_duration = {method: Histogram(DURATIONS) for method in METHODS}
        self.batch_forward_duration = {method: Histogram(DURATIONS) for method in METHODS}
        self.batch_decode_duration = {method: Histogram(DURATIONS) for method in METHODS}
        self.batch_filter_duration = {"decode": Histogram(DURATIONS)}
        self.batch_concat = dict.fromkeys(JOINING, 0)
        self.batch_concat_duration = {"decode": Histogram(DURATIONS)}

    def refused(self, tenant: str, workload: str, reason: str) -> None:
        """A call was turned away with 429 or 503."""
        self._refused[tenant, workload, reason] += 1

    def late(self, tenant: str, workload: str, stage: str) -> None:
        """A request's deadline has passed while it was waiting or running, or could not be met any more ("hopeless")."""
        self._late[tenant, workload, stage] += 1

    def drafted(self, timings: pb.Timings) -> None:
        """A step's draft tokens, looked up or of the draft model."""
        for counts, all_kinds, model in (
            (self._draft_tokens, timings.draft_tokens, timings.model_draft_tokens),
            (self._accepted_draft_tokens, timings.accepted_tokens, timings.model_accepted_tokens),
        ):
            counts["lookup"] += all_kinds - model
            counts["model"] += model

    def used(self, tenant: str, prompt_tokens: int, generated_tokens: int) -> None:
        """A request has left that produced something."""
        self._prompt_tokens[tenant] += prompt_tokens
        self._generated_tokens[tenant] += generated_tokens

    def render(self, gauges: Gauges) -> str:
        """The Prometheus text format."""
        out: list[str] = []

        def family(name: str, kind: str, help: str, samples: Iterable[str]) -> None:
            out.append(f"# HELP {name} {help}")
            out.append(f"# TYPE {name} {kind}")
            out.extend(samples)

        def plain(name: str, kind: str, help: str, value: int) -> None:
            family(name, kind, help, [f"{name} {value}"])

        def labelled(name: str, label: str, help: str, values: dict[str, int]) -> None:
            family(name, "counter", help, [f'{name}{{{label}="{key}"}} {value}' for key, value in values.items()])

        def by_tenant(name: str, third: str, help: str, values: Counter[tuple[str, str, str]]) -> None:
            lines = [f'{name}{{tenant="{t}",class="{c}",{third}="{x}"}} {n}' for (t, c, x), n in values.items()]
            family(name, "counter", help, lines)

        def histogram(name: str, help: str, value: Histogram) -> None:
            family(name, "histogram", help, value.lines(name, ""))

        def by_method(name: str, help: str, values: dict[str, Histogram]) -> None:
            lines = [line for method, value in values.items() for line in value.lines(name, f'method="{method}"')]
            family(name, "histogram", help, lines)

        plain("tgi_request_count", "counter", "Generation requests", self.request_count)
        plain("tgi_request_success", "counter", "Requests that ended well", self.request_success)
        labelled("tgi_request_failure", "err", "Requests that did not end well", self.request_failure)
        by_tenant("tgi_request_refused", "reason", "Calls turned away with 429 or 503", self._refused)
        by_tenant("tgi_request_late", "stage", "Requests that did not end within their deadline", self._late)
        labelled("tgi_tenant_prompt_tokens", "tenant", "Prompt tokens of requests that ran", self._prompt_tokens)
        labelled("tgi_tenant_generated_tokens", "tenant", "Output tokens", self._generated_tokens)
        histogram("tgi_request_duration", "Seconds from arrival to end", self.request_duration)
        histogram("tgi_request_validation_duration", "Seconds of checks and tokenizing", self.validation_duration)
        histogram("tgi_request_queue_duration", "Seconds in the queue", self.queue_duration)
        histogram("tgi_request_inference_duration", "Seconds from admission to end", self.inference_duration)
        histogram("tgi_request_mean_time_per_token_duration", "Seconds of inference per token", self.time_per_token)
        histogram("tgi_request_generated_tokens", "Output tokens", self.generated_tokens)
        histogram("tgi_request_max_new_tokens", "Output tokens allowed", self.max_new_tokens)
        histogram("tgi_request_input_length", "Prompt tokens", self.input_length)
        histogram("tgi_request_skipped_tokens", "Tokens of a request in a step beyond the first", self.skipped_tokens)
        plain("tgi_queue_size", "gauge", "Requests that wait", gauges.queue_size())
        plain("headrace_queue_tokens", "gauge", "Tokens that these may take", gauges.queue_tokens())
        plain("tgi_batch_current_size", "gauge", "Requests that run", gauges.batch_size())
        plain("tgi_batch_current_max_tokens", "gauge", "Tokens that these may grow to", gauges.batch_tokens())
        plain("tgi_batch_max_total_tokens", "gauge", "Tokens that fit at once", gauges.max_batch_total_tokens)
        plain("headrace_prefix_cache_queried_tokens", "counter", "Prompt tokens admitted", self.prefix_cache_queried_tokens)
        plain(
            "headrace_prefix_cache_hit_tokens", "counter", "Prompt tokens that needed no forward pass",
            self.prefix_cache_hit_tokens,
        )
        labelled("headrace_draft_tokens", "kind", "Draft tokens computed", self._draft_tokens)
        labelled("headrace_accepted_draft_tokens", "kind", "Draft tokens that were right", self._accepted_draft_tokens)
        histogram("tgi_batch_next_size", "Requests admitted at once", self.batch_next_size)
        labelled("tgi_batch_inference_count", "method", "Calls to the shard", self.batch_inference_count)
        labelled("tgi_batch_inference_success", "method", "Calls that ended well", self.batch_inference_success)
        labelled("tgi_batch_inference_failure", "method", "Calls that failed", self.batch_inference_failure)
        by_method("tgi_batch_inference_duration", "Seconds of one step", self.batch_inference_duration)
        by_method("tgi_batch_forward_duration", "Seconds of one forward pass", self.batch_forward_duration)
        by_method("tgi_batch_decode_duration", "Seconds of one step's sampling", self.batch_decode_duration)
        by_method("tgi_batch_filter_duration", "Seconds until requests that left were out", self.batch_filter_duration)
        labelled("tgi_batch_concat", "reason", "Prefills that joined a running batch", self.batch_concat)
        by_method("tgi_batch_concat_duration", "Seconds until such were in it", self.batch_concat_duration)
        return "\n".join(out) + "\n"
