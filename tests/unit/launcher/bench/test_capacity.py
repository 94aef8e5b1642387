"""The search for the capacity: where it ends, what passes, and what is given up."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from rich.console import Console

from headrace_launcher.bench import report
from headrace_launcher.bench.capacity import CLOSENESS, MOST_TRIALS, Lost, Traffic, Trial, search, shares
from headrace_launcher.bench.events import Answer
from headrace_launcher.bench.load import Job, Load, Outcome, Sent, make_headers

LOAD = Load("http://x", "chat")


def chunk(at: float, text: str) -> tuple[float, bytes]:
    return at, b'data: {"choices": [{"delta": {"content": ' + json.dumps(text).encode() + b"}}]}\n\n"


def trial(rows: list[tuple[float, float, float | None]]) -> Trial:
    """Of requests (seconds of their start, of their first token, of their end; None: failed) against a TTFT of a second."""
    point = {
        "requests": len(rows), "good": sum(end is not None and first - at <= 1 for at, first, end in rows),
        "rows": [{"at": at} if end is None else {"at": at, "e2e": (end - at) * 1e3} for at, _, end in rows],
    }
    return Trial(1.0, point)


def test_what_passes() -> None:
    even = [(n, n + 0.5, n + 1.5) for n in range(100)]
    assert trial([(float(a), b, c) for a, b, c in even]).passed
    assert not trial([*even, (100.0, 100.5, None), (101.0, 103.0, 104.0)]).passed  # two of 102 missed it
    growing = [(n, n + 0.5, n * 2.0) for n in range(100)]  # half of those that come stay
    assert trial([(float(a), b, c) for a, b, c in growing]).growth == pytest.approx(25, abs=2)
    assert not trial([(float(a), b, c) for a, b, c in growing]).passed
    assert not Trial(1.0, None).passed


@pytest.mark.parametrize(("capacity", "first"), [(7.0, 1.0), (7.0, 100.0), (0.3, 1.0), (5.0, 5.0)])
async def test_the_search_ends_just_below_the_capacity(capacity: float, first: float) -> None:
    tried: list[float] = []

    async def attempt(rate: float) -> Trial:
        tried.append(rate)
        return Trial(rate, {"requests": 1, "good": 1, "rows": [{"at": 0.0}]} if rate <= capacity else None)

    found, trials = await search(attempt, first)
    assert capacity / CLOSENESS <= found <= capacity
    assert [one.rate for one in trials] == tried
    assert len(set(tried)) == len(tried) <= MOST_TRIALS


async def test_a_server_that_can_nothing_is_named() -> None:
    async def attempt(rate: float) -> Trial:
        return Trial(rate, None)

    with pytest.raises(RuntimeError, match="no rate keeps the targets"):
        await search(attempt, 1.0)


def test_a_trial_is_lost_when_too_many_have_failed_or_say_nothing() -> None:
    now = time.perf_counter()
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    sent = [
        Sent(), Sent(now - 9, chunks=[chunk(now - 8, "a")]), Sent(now - 0.5), Sent(now - 2, chunks=[(now - 2, role)]),
        Sent(now - 1, now, error="status 429"),
    ]
    lost = Lost(LOAD, {"ttft": 1000.0}, 1.5)
    assert lost(sent)
    assert lost.count == 2
    assert not Lost(LOAD, {"ttft": 1000.0}, 2)(sent)
    assert not Lost(LOAD, {"tpot": 1.0}, 1)(sent[:4])


def test_requests_say_their_class_deadline_and_key() -> None:
    traffic = Traffic(("chat", "document"), 0.1, None, 5, 10, {"ttft": 1000.0}, 2.5, seed=1)
    jobs = traffic.jobs(40, 3, tenants=2, rate=4.0)
    assert {job.workload for job in jobs} == {"chat", "document"}
    assert {(job.output_len, job.deadline) for job in jobs} == {(5, 2.5)}
    assert [job.tenant for job in jobs[:4]] == [0, 1, 0, 1]
    assert jobs == traffic.jobs(40, 3, tenants=2, rate=4.0) != traffic.jobs(40, 4, tenants=2, rate=4.0)
    headers = make_headers(Load("u", api_keys=("a", "b")), jobs[1])
    assert headers == {"Authorization": "Bearer b", "X-Headrace-Class": jobs[1].workload, "X-Request-Timeout-Ms": "2500"}
    assert make_headers(LOAD, Job("x", 1)) == {}


def test_shares_show_classes_and_keys() -> None:
    jobs = [Job("x", 1, "chat"), Job("y", 1, "document", tenant=1)]
    sent: list[Any] = [Sent(0.0, 2.0, [chunk(0.5, "a")]), Sent(0.0, 1.0, error="status 503")]
    answers = [Answer([0.5], "a", first=0.5), Answer(error="status 503")]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(shares(report.point(LOAD, jobs, Outcome(2.0, sent, answers), "3x", {})))
    lines = [line.split() for line in capture.get().splitlines()[1:]]
    assert lines[0] == ["chat", "1", "1", "1", "500", "500"]
    assert lines[1] == ["document", "1", "0", "0", "-", "-"]
    assert [line[:2] for line in lines[2:]] == [["key", "1"], ["key", "2"]]
