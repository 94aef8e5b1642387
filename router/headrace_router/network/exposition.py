"""A network's metrics in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from headrace_router.metrics import Histogram
from headrace_router.network.gateway import Gateway
from headrace_router.network.jobs import TERMINAL
from headrace_router.tenants import CLASSES


class _Page:
    """The families that are there so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, name: str, kind: str, about: str, rows: Mapping[str, float]) -> None:
        """`rows`: samples by their labels, in braces; "" for none."""
        self._head(name, kind, about)
        self.lines += [f"{name}{labels} {value:.9g}" for labels, value in rows.items()]

    def gauge(self, name: str, about: str, value: float) -> None:
        self.add(name, "gauge", about, {"": value})

    def counter(self, name: str, about: str, value: int) -> None:
        self.add(name, "counter", about, {"": value})

    def histograms(self, name: str, about: str, values: Mapping[str, Histogram]) -> None:
        """`values`: by their labels, without braces."""
        self._head(name, "histogram", about)
        for labels, value in values.items():
            self.lines += value.lines(name, labels)

    def _head(self, name: str, kind: str, about: str) -> None:
        self.lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def _labels(**values: str) -> str:
    quoted = (value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for value in values.values())
    return "{" + ",".join(f'{name}="{value}"' for name, value in zip(values, quoted, strict=True)) + "}"


def _by(label: str, values: Mapping[str, float]) -> dict[str, float]:
    return {_labels(**{label: key}): value for key, value in values.items()}


def _counts(keys: Iterable[str]) -> dict[str, int]:
    return dict(Counter(keys))


def render(gateway: Gateway, model: str) -> str:
    """The numbers of a gateway, and of the broker that it may share with others. `model`: its name."""
    page = _Page()
    _add_workers(page, gateway, model)
    _add_queue(page, gateway)
    _add_requests(page, gateway, model)
    _add_times(page, gateway)
    return "\n".join(page.lines) + "\n"


def _add_workers(page: _Page, gateway: Gateway, model: str) -> None:
    sessions, metrics = list(gateway.sessions.values()), gateway.metrics
    rows = _counts(_labels(tier=s.tier, model=model, state=s.state) for s in sessions)
    page.add("wn_workers", "gauge", "Workers that are connected", rows)
    slots = {"used": sum(len(s.outputs) for s in sessions), "granted": sum(s.slots for s in sessions)}
    page.add("wn_worker_slots", "gauge", "Requests that workers run, and may run", _by("state", slots))
    page.gauge("wn_worker_tokens_per_second", "Output tokens of all workers", sum(s.tokens_per_second for s in sessions))
    stale = gateway.broker.counts.stale_frames + metrics.stale_frames
    page.counter("wn_stale_frames_total", "Frames about jobs that their worker does not hold", stale)
    unknown = metrics.unknown_frames + sum(s.line.unknown for s in sessions)
    page.counter("wn_unknown_frames_total", "Frames of unknown kinds", unknown)
    malformed = metrics.malformed_frames + sum(s.line.malformed for s in sessions)
    page.counter("wn_malformed_frames_total", "Frames that are none, or say what cannot be", malformed)


def _add_queue(page: _Page, gateway: Gateway) -> None:
    broker = gateway.broker
    page.add("wn_queue_depth", "gauge", "Requests that wait for a worker", _by("class", broker.waiting_by_class))
    page.gauge("wn_queue_tokens", "Tokens that these may take", broker.waiting_tokens)
    page.gauge("wn_running", "Requests at workers", broker.leased)


def _add_requests(page: _Page, gateway: Gateway, model: str) -> None:
    counts, metrics = gateway.broker.counts, gateway.metrics
    page.counter("wn_accepted_total", "Requests that were accepted", counts.accepted)
    page.add("wn_terminal_events_total", "counter", "Requests that have ended", _by("kind", counts.outcomes))
    page.gauge("wn_live", "Requests that were accepted and have not ended", gateway.live)
    if not gateway.broker.durable:  # of a shared one this gateway has seen a part
        lost = counts.accepted - sum(counts.outcomes.values()) - gateway.live
        page.gauge("wn_unaccounted", "Accepted requests that have neither ended nor live: always 0", lost)
    outcomes = {(kind, name): metrics.outcomes[kind, name] for kind in TERMINAL for name in CLASSES}
    rows = {_labels(outcome=kind, model=model, tenant_class=name): n for (kind, name), n in outcomes.items()}
    page.add("wn_requests_total", "counter", "Requests from here that have ended", rows)
    page.add("wn_admission_rejects_total", "counter", "Requests that were not accepted", _by("reason", metrics.rejects))
    page.add("wn_redeliveries_total", "counter", "Requests given to another worker", _by("reason", counts.redeliveries))
    page.counter("wn_lease_expired_total", "Leases that lapsed", counts.redeliveries.get("lease", 0))
    page.counter("wn_resume_tokens_total", "Tokens that another worker went on after", counts.resumed_tokens)
    page.counter("wn_duplicate_events_total", "Tokens that were there already", metrics.duplicates)
    page.gauge("wn_sse_readers", "Readers of requests' events", metrics.readers)
    page.counter("wn_sse_resumes_total", "Readers that went on after an event", metrics.resumes)


def _add_times(page: _Page, gateway: Gateway) -> None:
    metrics = gateway.metrics
    for name, about, value in (
        ("wn_queue_wait_seconds", "From submission to the first worker", metrics.queue_wait),
        ("wn_attempts", "Workers that an ended request has had", metrics.attempts),
        ("wn_ttft_seconds", "From submission to the first token", metrics.first_token),
        ("wn_worker_rtt_seconds", "Of a ping to a worker", metrics.round_trip),
        ("wn_cancel_latency_seconds", "From a cancel to the worker's answer", metrics.cancel_latency),
    ):
        page.histograms(name, about, {"": value})
    gaps = {'side="worker"': metrics.gap_at_worker, 'side="client"': metrics.gap_at_client}
    page.histograms("wn_itl_seconds", "Between two tokens of a request, as they come from the worker and as they go out", gaps)
    page.histograms(
        "wn_broker_op_seconds", "Of a transition in what the jobs are kept in",
        {f'op="{name}"': value for name, value in gateway.broker.op_seconds.items()},
    )
