"""The numbers of a gateway: plain in the hot path, rendered as text when scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from headrace_router.metrics import DURATIONS, Histogram
from headrace_router.network.jobs import TERMINAL

ATTEMPTS = tuple(float(n) for n in range(1, 9))


class NetworkMetrics:
    """What a gateway has seen since it began, beside what its broker counts. Times in seconds."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by outcome, class
        self.rejects: Counter[str] = Counter()  # by reason
        self.queue_wait = Histogram(DURATIONS)  # from submission to the first worker
        self.attempts = Histogram(ATTEMPTS)  # of ended requests
        self.first_token = Histogram(DURATIONS)  # from submission
        self.gap_at_worker = Histogram(DURATIONS)  # between two tokens of a request, as they come from the worker
        self.gap_at_client = Histogram(DURATIONS)  # as they go to the client
        self.round_trip = Histogram(DURATIONS)  # of a ping to a worker
        self.cancel_latency = Histogram(DURATIONS)  # from a cancel to the worker's answer
        self.duplicates = 0  # tokens that were there already
        self.stale_frames = 0  # about jobs that their sender does not hold
        self.unknown_frames = self.malformed_frames = 0  # of workers that have left
        self.readers = 0  # of /v1/requests/ID/events, now
        self.resumes = 0  # readers that went on after an event


def labelled(label: str, values: Mapping[str, int]) -> dict[str, int]:
    """Samples by the values of one label."""
    return {f'{{{label}="{key}"}}': value for key, value in values.items()}


class Page:
    """Prometheus' text format, family by family."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, about: str, rows: Mapping[str, float]) -> None:
        """`rows`: samples by their labels, in braces; "" for none."""
        self._head(name, kind, about)
        self._lines += [f"{name}{labels} {value:.9g}" for labels, value in rows.items()]

    def histograms(self, name: str, about: str, values: Mapping[str, Histogram]) -> None:
        """`values`: by their labels, without braces."""
        self._head(name, "histogram", about)
        for labels, value in values.items():
            self._lines += value.lines(name, labels)

    def _head(self, name: str, kind: str, about: str) -> None:
        self._lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"


def add_requests(page: Page, metrics: NetworkMetrics, model: str) -> None:
    """What has become of requests."""
    outcomes = {(kind, "chat"): 0 for kind in TERMINAL} | dict(metrics.outcomes)
    page.family(
        "wn_requests_total", "counter", "Requests that have ended",
        {f'{{outcome="{o}",model="{_escaped(model)}",tenant_class="{c}"}}': n for (o, c), n in outcomes.items()},
    )
    page.family(
        "wn_admission_rejects_total", "counter", "Requests that were not accepted", labelled("reason", metrics.rejects)
    )
    for name, about, value in (
        ("wn_queue_wait_seconds", "From submission to the first worker", metrics.queue_wait),
        ("wn_attempts", "Workers that an ended request has had", metrics.attempts),
        ("wn_ttft_seconds", "From submission to the first token", metrics.first_token),
        ("wn_worker_rtt_seconds", "Of a ping to a worker", metrics.round_trip),
        ("wn_cancel_latency_seconds", "From a cancel to the worker's answer", metrics.cancel_latency),
    ):
        page.histograms(name, about, {"": value})
    page.histograms(
        "wn_itl_seconds", "Between two tokens of a request",
        {'side="worker"': metrics.gap_at_worker, 'side="client"': metrics.gap_at_client},
    )
    page.family("wn_duplicate_events_total", "counter", "Tokens that were there already", {"": metrics.duplicates})
    page.family("wn_sse_readers", "gauge", "Readers of requests' events", {"": metrics.readers})
    page.family("wn_sse_resumes_total", "counter", "Readers that went on after an event", {"": metrics.resumes})


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def by(names: Iterable[str], keys: Iterable[tuple[str, ...]]) -> dict[str, int]:
    """How many there are of each combination of labels."""
    labels = list(names)
    counted = Counter(keys)
    return {
        "{" + ",".join(f'{n}="{_escaped(v)}"' for n, v in zip(labels, key, strict=True)) + "}": count
        for key, count in counted.items()
    }
