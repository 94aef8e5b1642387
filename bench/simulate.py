"""`python -m bench.simulate`: scheduling policies under the same load, in virtual time.

    python -m bench.simulate --machine h200-8b --workload chat --workload agent --load 0.7 --load 3
    python -m bench.simulate --find-capacity --scale 0.1 --output-len 8 --patience 6 --tenants 2

The router's own queue, presets, bounds and forecast, and the shard's own rule for chunks, are driven by a model of what a step
costs. Loads are multiples of the capacity: the rate that the machine would keep up with, were 32 requests in every step; with
--find-capacity, the largest one at which the policy's p99 TTFT stays under 5 s. No policy is given a KV cache, a prefix cache
or a machine that another one lacks: only who runs when differs. Of others than ours nobody is turned away but by a full queue.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from bench.simulation.cost import MACHINES, Machine
from bench.simulation.engine import MAX_BATCH, Simulation, Trace
from bench.simulation.policies import POLICIES, Policy, Running
from headrace_launcher.bench.capacity import FEWEST_REQUESTS, TARGETS, Trial, search
from headrace_launcher.bench.load import arrivals
from headrace_launcher.bench.report import is_good
from headrace_launcher.bench.stats import percentile
from headrace_launcher.bench.workloads import WORKLOADS, Lengths, draw_lengths
from headrace_router.presets import PRESETS, Preset
from headrace_router.tenants import Tenant

HEAD = ("load", "policy", "class", "served", "good/s", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "waits at most")


def capacity(machine: Machine, drawn: Sequence[Lengths], rows: int) -> float:
    """Requests a second that the machine could serve for ever with `rows` decode rows in every step."""
    count = len(drawn)
    output = sum(lengths.output for lengths in drawn) / count
    prompt = sum(lengths.shared + lengths.own for lengths in drawn) / count
    context = sum(lengths.shared + lengths.own + lengths.output / 2 for lengths in drawn) / count
    rows = min(rows, int(machine.kv_tokens / (prompt + output)))
    steps = output / rows  # of a request's share
    return 1 / (steps * machine.seconds(rows, 0, int(rows * context)) + machine.prompt * prompt)


def measures(request: Running) -> dict[str, object]:
    """A request's row, as `headrace bench` has it; milliseconds."""
    ttft, e2e = ((at - request.at) * 1e3 for at in (request.times[0], request.times[-1]))
    tpot = (e2e - ttft) / (request.said - 1) if request.said > 1 else None
    return {"workload": request.workload, "error": None, "ttft": ttft, "e2e": e2e, "tpot": tpot}


def run(
    policy: type[Policy], machine: Machine, tuned: Preset, drawn: Sequence[Lengths], rate: float, seed: int,
    max_batch: int = MAX_BATCH, patience: float | None = None, tenants: int = 1,
) -> Trace:
    """Serve the requests, arriving at `rate` a second. `patience`: seconds after which clients leave, of tenants in turn."""
    names = [Tenant(f"tenant {n}") for n in range(tenants)]
    return Simulation(policy, machine, tuned, max_batch).run(drawn, arrivals(rate, len(drawn), seed), patience, names)


def find_capacity(attempt: Callable[[float], tuple[Sequence[Lengths], Trace]], first: float) -> float:
    """The largest rate at which p99 TTFT stays under 5 s and no queue grows; see `headrace bench --find-capacity`."""
    async def trial(rate: float) -> Trial:
        drawn, trace = attempt(rate)
        rows = [{**measures(request), "at": request.at} for request in trace.ended]
        rows += [{"at": request.at} for request in (*trace.refused, *trace.late)]
        return Trial(rate, {"requests": len(drawn), "good": len(in_time(trace)), "rows": rows})

    return asyncio.run(search(trial, first))[0]


def in_time(trace: Trace) -> list[Running]:
    """Those that ended, and had their first token soon enough."""
    return [request for request in trace.ended if is_good(measures(request), TARGETS)]


def lines(load: str, name: str, trace: Trace) -> list[tuple[str, ...]]:
    """A line for each class; milliseconds, but seconds for the longest wait."""
    made = []
    everyone = [*trace.ended, *trace.refused, *trace.late]
    for workload in [w for w in WORKLOADS if any(request.workload == w for request in everyone)]:
        mine = [request for request in trace.ended if request.workload == workload]
        total = sum(request.workload == workload for request in everyone)
        rows = [measures(request) for request in mine]
        gaps = [(b - a) * 1e3 for r in mine for a, b in zip(r.times, r.times[1:], strict=False)]
        ttft, e2e = ([float(str(row[key])) for row in rows] for key in ("ttft", "e2e"))
        good = sum(is_good(row, {}) for row in rows) / trace.seconds
        cells = [
            f"{percentile(values, n):.4g}" if values else "-"
            for values, n in ((ttft, 50), (ttft, 99), (gaps, 50), (gaps, 99), (e2e, 50))
        ]
        longest = f"{max(ttft) / 1e3:.3g} s" if ttft else "-"
        made.append((load, name, workload, f"{len(mine)}/{total}", f"{good:.3g}", *cells, longest))
    return made


def parts(drawn: Sequence[Lengths], trace: Trace) -> str:
    """Of each class, how many of its requests were in time."""
    good = Counter(request.workload for request in in_time(trace))
    every = Counter(lengths.workload for lengths in drawn)
    return ", ".join(f"{good[name]}/{every[name]} {name}s" for name in WORKLOADS if every[name])


def main() -> int:
    """The command."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=MACHINES, default="cpu")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="may be repeated; all if not given")
    parser.add_argument("--preset", choices=PRESETS, default="chat", help="of --workload of the server")
    parser.add_argument("--load", type=float, action="append", help="multiple of the capacity; may be repeated")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths")
    parser.add_argument("--kv-tokens", type=int, help="that the KV cache holds; the machine's if not given")
    parser.add_argument("--max-step-tokens", type=int, help="the preset's if not given")
    parser.add_argument("--max-queue-size", type=int, help="the preset's if not given")
    parser.add_argument("--output-len", type=int, help="tokens of every answer; the workload's if not given")
    parser.add_argument("--patience", type=float, help="seconds after which clients leave; the server knows")
    parser.add_argument("--tenants", type=int, default=1, help="that take turns")
    parser.add_argument("--find-capacity", action="store_true", help="of each policy; good is then: TTFT under 5 s")
    parser.add_argument("--seconds", type=float, default=120.0, help="that arrivals last with --find-capacity")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    machine = MACHINES[given.machine]
    if given.kv_tokens:
        machine = replace(machine, kv_tokens=given.kv_tokens)
    tuned = PRESETS[given.preset]
    if given.max_step_tokens:
        tuned = replace(tuned, max_step_tokens=given.max_step_tokens)
    if given.max_queue_size:
        tuned = replace(tuned, max_queue_size=given.max_queue_size)

    def draw(count: int) -> list[Lengths]:
        return draw_lengths(
            given.workload or tuple(WORKLOADS), count, given.seed, given.scale, output_len=given.output_len
        )

    console = Console(width=140)
    drawn = draw(given.requests)
    most = capacity(machine, drawn, rows=32)
    console.print(f"{given.machine}: capacity {most:.3g} requests/s; server: {tuned}")
    if given.find_capacity:
        for name, policy in POLICIES.items():
            def attempt(rate: float, policy: type[Policy] = policy) -> tuple[list[Lengths], Trace]:
                drawn = draw(max(round(rate * given.seconds), FEWEST_REQUESTS))
                return drawn, run(
                    policy, machine, tuned, drawn, rate, given.seed, patience=given.patience, tenants=given.tenants
                )

            found = find_capacity(attempt, most)
            console.print(f"{name}: {found:.3g} requests/s with p99 TTFT under 5 s")
            for load in given.load or (3.0,):
                drawn, trace = attempt(load * found)
                share = len(in_time(trace)) / trace.seconds / found
                console.print(f"  {load:g}x: {share:.0%} of that within 5 s; {parts(drawn, trace)}")
        return 0
    table = Table(*HEAD, box=None, header_style="bold", pad_edge=False)
    for load in given.load or (0.7, 3.0):
        for name, policy in POLICIES.items():
            trace = run(
                policy, machine, tuned, drawn, load * most, given.seed, patience=given.patience, tenants=given.tenants
            )
            for line in lines(f"{load:g}x", name, trace):
                table.add_row(*line)
    console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
