"""The numbers of a gateway: plain in the hot path; `exposition` makes text of them."""

from __future__ import annotations

from collections import Counter

from headrace_router.metrics import DURATIONS, Histogram

ATTEMPTS = tuple(float(n) for n in range(1, 9))


class NetworkMetrics:
    """What a gateway has seen since it began, beside what its broker counts. Times in seconds."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by outcome, class
        self.rejects: Counter[str] = Counter()  # by reason
        self.queue_wait = Histogram(DURATIONS)  # from submission to the first worker
        self.attempts = Histogram(ATTEMPTS)  # of ended requests
        self.first_token = Histogram(DURATIONS)  # from submission
        self.gap_at_worker = Histogram(DURATIONS)  # before tokens of a request, as they come from the worker
        self.gap_at_client = Histogram(DURATIONS)  # as they go to the client
        self.round_trip = Histogram(DURATIONS)  # of a ping to a worker
        self.cancel_latency = Histogram(DURATIONS)  # from a cancel to the worker's answer
        self.duplicates = 0  # tokens that were there already
        self.stale_frames = 0  # about jobs that their sender does not hold
        self.unknown_frames = self.malformed_frames = 0  # of workers that have left
        self.readers = 0  # of /v1/requests/ID/events, now
        self.resumes = 0  # readers that went on after an event
