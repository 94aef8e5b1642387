"""What the service takes: the largest rate of mixed requests of two tenants whose p99 TTFT stays under 5 s, and three times it.

Requests are short, so that a trial lasts seconds, and say after how long they are of no use any more.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.figures import Figure, Result
from headrace_launcher.bench import report
from headrace_launcher.bench.capacity import TARGETS, Prober, Traffic
from headrace_launcher.bench.load import Load
from headrace_launcher.bench.workloads import WORKLOADS
from tests.processes import Service

OVERLOAD = 3
KEYS = ("sk-first", "sk-second")
TRAFFIC = Traffic(
    tuple(WORKLOADS), scale=0.1, input_len=None, output_len=8, seconds=20.0, targets=TARGETS, deadline=6.0, seed=1
)


def measure() -> Result:
    """Search and overload one service."""
    result = Result("capacity", setup={**asdict(TRAFFIC), "overload": OVERLOAD, "tenants": len(KEYS)})
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        keys = Path(folder) / "keys.toml"
        keys.touch(0o600)
        keys.write_text("\n".join(f'[tenants.t{n}]\nkeys = ["{key}"]' for n, key in enumerate(KEYS)), "utf-8")
        service = Service("--api-keys-file", str(keys))
        try:
            load = Load(service.wait_ready().url, api_keys=KEYS, ignore_eos=True)
            prober = Prober(load, TRAFFIC, lambda text: print(f"  {text}", file=sys.stderr, flush=True))

            async def search_and_overload() -> tuple[float, list[str], report.Point]:
                rate, trials = await prober.find(None)
                return rate, [str(trial) for trial in trials], await prober.overload(OVERLOAD * rate)

            rate, tried, above = asyncio.run(search_and_overload())
        finally:
            service.stop()
    parts = {**above["by_workload"], **{f"tenant {n}": part for n, part in above["by_tenant"].items()}}
    result.figures = [
        Figure("capacity: p99 TTFT under 5 s", "requests/s", rate),
        Figure(f"goodput at {OVERLOAD} times that", "x", above["goodput_per_s"] / rate, at_least=0.9),
        Figure("served there, of the class or tenant that gets least", "%",
               100 * min(part["good"] / part["requests"] for part in parts.values()), at_least=1),
        Figure("longest wait for a first token there", "s", above["ttft_ms"]["max"] / 1e3),
    ]
    shown = ("requests", "ok", "good", "ttft_ms")
    result.details = {"tried": tried, "served": {name: {key: part[key] for key in shown} for name, part in parts.items()}}
    return result
