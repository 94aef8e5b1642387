"""How much a server can take: the largest Poisson rate at which its requests keep their targets, and what more does to it.

A trial sends requests at one rate for some seconds. It is passed if 99 % of them keep the targets (with a target of TTFT
alone: if p99 TTFT does; a request that failed keeps none), and if those at work do not become more and more: what would
only overflow later passes no trial.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from headrace_launcher.bench import report
from headrace_launcher.bench.events import read_answer
from headrace_launcher.bench.load import Job, Load, Sent, arrivals, run_jobs
from headrace_launcher.bench.workloads import draw_lengths, make_jobs

TARGETS = {"ttft": 5000.0}  # milliseconds, if none are given
KEPT = 0.99  # of the requests
GROWTH = 0.1  # of a trial's requests: so many more may be at work at its last arrival than at half time
CLOSENESS = 1.1  # of the largest rate that passed and the smallest that did not
MOST_TRIALS = 12
FEWEST_REQUESTS = 20  # of a trial
PROBES = 16  # requests at once, to see where to begin


@dataclass(frozen=True)
class Traffic:
    """What is sent, at whatever rate.

    Attributes:
        mix: workloads; `scale` of their lengths; `input_len`, `output_len`: tokens, instead of the workloads'.
        seconds: that a trial lasts.
        targets: by measure, in milliseconds.
        deadline: seconds after which a request is of no use any more, and which it says; None: it says nothing.
    """

    mix: tuple[str, ...]
    scale: float
    input_len: int | None
    output_len: int | None
    seconds: float
    targets: dict[str, float]
    deadline: float | None
    seed: int

    def jobs(self, count: int, number: int, tenants: int, rate: float | None = None) -> list[Job]:
        """So many requests; those of another number have other prompts, so that no cache has seen them."""
        at = arrivals(rate, count, self.seed + number) if rate else None
        drawn = draw_lengths(self.mix, count, self.seed + number, self.scale, self.input_len, self.output_len)
        jobs = make_jobs(drawn, self.seed + number, at, tenants)
        return [replace(job, deadline=self.deadline) for job in jobs]


@dataclass(frozen=True)
class Trial:
    """One rate, and what came of it. `point`: None if it was given up, being lost already."""

    rate: float
    point: report.Point | None

    @property
    def passed(self) -> bool:
        if self.point is None or self.growth > GROWTH * self.point["requests"]:
            return False
        return bool(self.point["good"] >= KEPT * self.point["requests"])

    @property
    def growth(self) -> int:
        """How many more requests were at work at the last arrival than at half time. Those that failed count as gone."""
        if self.point is None:
            return 0
        spans: list[tuple[float, float]] = [(row["at"], row["at"] + row.get("e2e", 0.0) / 1e3) for row in self.point["rows"]]
        last = max(began for began, _ in spans)
        there: list[int] = [sum(began <= time <= ended for began, ended in spans) for time in (last / 2, last)]
        return there[1] - there[0]

    def __str__(self) -> str:
        verdict = "kept" if self.passed else "missed"
        if self.point is None:
            return f"{self.rate:.3g} requests/s: {verdict}, given up"
        return (
            f"{self.rate:.3g} requests/s: {verdict}, {self.point['good']} of {self.point['requests']} within the targets"
            + (f", and {self.growth} more at work at the end than at half time" if self.growth > 0 else "")
        )


async def search(attempt: Callable[[float], Awaitable[Trial]], rate: float) -> tuple[float, list[Trial]]:
    """(the largest rate that passed, all trials), beginning at `rate`: doubled or halved until there is one that passes
    and one that does not, then halved between them.

    Raises:
        RuntimeError: no rate passes.
    """
    trials: list[Trial] = []
    good, bad = 0.0, 0.0  # 0: none yet
    while len(trials) < MOST_TRIALS and not (good and bad and bad / good <= CLOSENESS):
        trials.append(await attempt(rate))
        if trials[-1].passed:
            good = rate
        else:
            bad = rate
        rate = (good * bad) ** 0.5 if good and bad else 2 * good or bad / 2
    if not good:
        raise RuntimeError(f"no rate keeps the targets, not even {bad:.3g} requests/s")
    return good, trials


class Prober:
    """Sends trials to a server, one after the other."""

    def __init__(self, load: Load, traffic: Traffic, say: Callable[[str], None]) -> None:
        """`say`: is told of each trial."""
        self._load, self._traffic, self._say = load, traffic, say
        self._tenants = max(len(load.api_keys), 1)
        self._number = 0

    async def find(self, first: float | None) -> tuple[float, list[Trial]]:
        """`search`, beginning at the rate of a closed loop if none is given.

        Raises:
            RuntimeError: no rate passes, or a request of the closed loop fails.
        """
        return await search(self.attempt, first or await self.closed_loop())

    async def closed_loop(self) -> float:
        """Requests a second with some of them always at work."""
        jobs = [replace(job, deadline=None) for job in self._traffic.jobs(2 * PROBES, 0, self._tenants)]
        outcome = await run_jobs(replace(self._load, concurrency=PROBES), jobs)
        if errors := outcome.errors():
            raise RuntimeError(f"{sum(errors.values())} of the first {len(jobs)} requests failed: {next(iter(errors))}")
        rate = len(jobs) / outcome.wall
        self._say(f"{PROBES} at once: {rate:.3g} requests/s")
        return rate

    async def attempt(self, rate: float) -> Trial:
        """One rate, given up as soon as it cannot be passed any more."""
        trial = await self._trial(rate, patient=False)
        self._say(str(trial))
        return trial

    async def overload(self, rate: float) -> report.Point:
        """One rate, to the end, whatever happens."""
        trial = await self._trial(rate, patient=True)
        assert trial.point is not None
        return trial.point

    async def _trial(self, rate: float, *, patient: bool) -> Trial:
        self._number += 1
        count = max(round(rate * self._traffic.seconds), FEWEST_REQUESTS)
        jobs = self._traffic.jobs(count, self._number, self._tenants, rate)
        lost = Lost(self._load, self._traffic.targets, (1 - KEPT) * count)
        outcome = await run_jobs(self._load, jobs, (lambda sent: False) if patient else lost)
        if lost.count > lost.most and not patient:
            return Trial(rate, None)
        return Trial(rate, report.point(self._load, jobs, outcome, f"{rate:.3g} req/s", self._traffic.targets))


class Lost:
    """Watches the requests of a trial: are there more than so many that have failed, or have no token in time?"""

    def __init__(self, load: Load, targets: dict[str, float], most: float) -> None:
        self._load, self.most, self.count = load, most, 0
        self._patience = min((targets[name] for name in ("ttft", "e2e") if name in targets), default=float("inf")) / 1e3

    def __call__(self, sent: Sequence[Sent]) -> bool:
        now = time.perf_counter()
        self.count = sum(one.error is not None or self._late(one, now) for one in sent)
        return self.count > self.most

    def _late(self, one: Sent, now: float) -> bool:
        if not one.began or one.whole or now - one.began < self._patience:
            return False
        return read_answer(self._load.api, one.chunks).first is None


def shares(point: report.Point) -> Table:
    """Who got what of a trial: by workload, and by tenant where there are several."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("of", "requests", "served", "within the targets", "TTFT p50", "longest"):
        made.add_column(name, justify="left" if name == "of" else "right")
    parts = dict(point["by_workload"])
    if len(point["by_tenant"]) > 1:
        parts |= {f"key {number + 1}": part for number, part in point["by_tenant"].items()}
    for name, part in parts.items():
        ttft = part["ttft_ms"] or {}
        times = (f"{ttft[key]:.0f}" if ttft else "-" for key in ("p50", "max"))
        made.add_row(name, str(part["requests"]), str(part["ok"]), str(part["good"]), *times)
    return made
