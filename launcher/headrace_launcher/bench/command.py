"""`headrace bench`: options, the loads one after the other with live progress, and what is written at the end."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace_launcher.bench import capacity, compare, page, report
from headrace_launcher.bench.capacity import Prober, Traffic, Trial
from headrace_launcher.bench.events import Api
from headrace_launcher.bench.load import Job, Load, Sent, arrivals, find_model, run_jobs
from headrace_launcher.bench.workloads import WORKLOADS, draw_lengths, make_jobs, read_trace

APIS: dict[str, Api] = {"openai": "chat", "completions": "completions", "tgi": "tgi"}
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Plan:
    """Which loads to send. Several rates or concurrencies make several points of one result."""

    rates: tuple[float, ...]
    concurrencies: tuple[int, ...]
    trace: Path | None
    mix: tuple[str, ...]
    requests: int
    scale: float
    input_len: int | None
    output_len: int | None
    seed: int
    warmup: int
    targets: dict[str, float]
    tenants: int = 1
    deadline: float | None = None

    def loads(self, base: Load) -> list[tuple[str, Load, list[Job]]]:
        """(label, load, jobs) of each point. Prompts differ from point to point, so that no cache has seen them; what a
        workload shares stays.

        Raises:
            ValueError: the trace is not usable.
        """
        if self.trace is not None:
            return [("trace", base, read_trace(self.trace))]
        made: list[tuple[str, Load, list[Job]]] = []
        for rate in self.rates:
            at = arrivals(rate, self.requests, self.seed)
            made.append((f"{rate:g} req/s", base, self.jobs(len(made), at)))
        for streams in self.concurrencies:
            made.append((f"{streams} at once", replace(base, concurrency=streams), self.jobs(len(made))))
        return made

    def jobs(self, number: int, at: Sequence[float] | None = None) -> list[Job]:
        """The requests of one point."""
        drawn = draw_lengths(self.mix, self.requests, self.seed, self.scale, self.input_len, self.output_len)
        jobs = make_jobs(drawn, self.seed + number, at, self.tenants)
        return [replace(job, deadline=self.deadline) for job in jobs]


def parse_targets(given: Sequence[str]) -> dict[str, float]:
    """`ttft=500` and so on, in milliseconds.

    Raises:
        ValueError: it is something else.
    """
    targets = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in report.MEASURES or not value.replace(".", "", 1).isdigit():
            raise ValueError(f"--target {text}: there are {', '.join(f'{name}=MS' for name in report.MEASURES)}")
        targets[name] = float(value)
    return targets


async def measure(plan: Plan, base: Load, progress: Progress) -> list[report.Point]:
    """Send the loads one after the other.

    Raises:
        RuntimeError: a warm-up request failed.
    """
    points: list[report.Point] = []
    for label, load, jobs in plan.loads(base):
        if plan.warmup and not points:
            first = [Job(job.prompt, WARM_UP_TOKENS, job.workload) for job in jobs[: plan.warmup]]
            if errors := (await run_jobs(replace(load, concurrency=1), first)).errors():
                raise RuntimeError(f"the warm-up failed: {next(iter(errors))}")
        task = progress.add_task(label, total=len(jobs), running=0)

        def watch(sent: list[Sent], task: Any = task) -> bool:
            done = sum(one.ended > 0 for one in sent)
            progress.update(task, completed=done, running=sum(one.began > 0 for one in sent) - done)
            return False

        outcome = await run_jobs(load, jobs, watch)
        progress.update(task, completed=len(jobs), running=0)
        points.append(report.point(load, jobs, outcome, label, plan.targets))
    return points


def show(console: Console, points: Sequence[report.Point]) -> None:
    """The table, and what a reader must know to judge it."""
    console.print(report.table(points))
    console.print("durations in ms; good: within the targets")
    for point in points:
        for error, count in point["errors"].items():
            console.print(f"{point['label']}: {count} failed: {error}", style="red", markup=False)
        if point["short_answers"]:
            short = point["short_answers"]
            console.print(f"{point['label']}: {short} answers ended early; --ignore-eos makes all equally long")
        if point["tokens_counted_by"] != "usage":
            console.print(f"{point['label']}: the server reports no usage: events are counted as tokens")


def run(
    plan: Plan, load: Load, output: Path | None, html: Path | None, svg: Path | None, *, model: str | None
) -> int:
    """Measure, print and write; the exit status, 1 if a request failed."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[running]} running"),
        TimeElapsedColumn(),
    )

    async def all_of_it() -> list[report.Point]:
        used = replace(load, model=model or await find_model(load))
        return await measure(plan, used, progress)

    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            points = asyncio.run(all_of_it())
    except (RuntimeError, ValueError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        return 1
    show(Console(width=None if sys.stdout.isatty() else 160), points)
    targets: dict[str, Any] = {**plan.targets} or {name: WORKLOADS[name].targets for name in plan.mix}
    setup = {
        "url": load.url, "api": load.api, "mix": list(plan.mix), "requests": plan.requests, "scale": plan.scale,
        "input_len": plan.input_len, "output_len": plan.output_len, "ignore_eos": load.ignore_eos,
        "temperature": load.temperature, "seed": plan.seed, "deadline": plan.deadline,
        "trace": None if plan.trace is None else plan.trace.name, "targets": targets,
    }
    write({"setup": setup, "points": points}, output, html, svg)
    return 0 if all(point["ok"] == point["requests"] for point in points) else 1


def write(result: dict[str, Any], output: Path | None, html: Path | None, svg: Path | None) -> None:
    """Write what is asked for: JSON, the page, the pictures."""
    if output is not None:
        output.write_text(json.dumps(result, indent=1), "utf-8")
    if html is not None:
        html.write_text(page.html(result), "utf-8")
    if svg is not None:
        svg.mkdir(parents=True, exist_ok=True)
        for name, picture in page.pictures(result["points"]).items():
            (svg / f"{name}.svg").write_text(picture, "utf-8")


def run_capacity(
    traffic: Traffic, load: Load, first: float | None, overload: float,
    output: Path | None, html: Path | None, svg: Path | None, *, model: str | None,
) -> int:
    """Find the capacity, send `overload` times as much (0: nothing more), print and write; the exit status."""
    say = partial(click.echo, err=True)

    async def all_of_it() -> tuple[float, list[Trial], report.Point | None]:
        prober = Prober(replace(load, model=model or await find_model(load)), traffic, say)
        rate, trials = await prober.find(first)
        return rate, trials, await prober.overload(overload * rate) if overload else None

    try:
        rate, trials, above = asyncio.run(all_of_it())
    except (RuntimeError, ValueError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        return 1
    points = [trial.point for trial in trials if trial.point is not None] + ([above] if above is not None else [])
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(report.table(points))
    wanted = ", ".join(f"{name} {most:g} ms" for name, most in traffic.targets.items())
    console.print(f"capacity: {rate:.3g} requests/s ({wanted} kept by 99 %)")
    if above is not None:
        console.print(f"at {overload:g} times that: {above['goodput_per_s'] / rate:.0%} of it within the targets")
        console.print(capacity.shares(above))
    setup = {
        "url": load.url, "api": load.api, "mix": list(traffic.mix), "scale": traffic.scale, "seconds": traffic.seconds,
        "ignore_eos": load.ignore_eos, "temperature": load.temperature, "seed": traffic.seed, "targets": traffic.targets,
        "deadline": traffic.deadline, "overload": overload,
    }
    write({"setup": setup, "capacity": rate, "points": points}, output, html, svg)
    return 0


def run_compare(first: Path, second: Path) -> int:
    """Print two results side by side; the exit status."""
    try:
        results = [json.loads(path.read_text("utf-8")) for path in (first, second)]
        table = compare.table(results[0], results[1], (first.stem, second.stem))
    except (OSError, ValueError, KeyError, TypeError) as error:
        click.echo(f"error: {type(error).__name__}: {error}", err=True)
        return 1
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0
