"""What a record says of the machine: enough to judge a figure, nothing that tells whose machine it was."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any


def facts() -> dict[str, Any]:
    """Cores, CPU, versions, date, and the load of the last minute, which should be near 0 before a measurement."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text("utf-8")),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers", "grpcio", "aiohttp")},
        "load_before": round(os.getloadavg()[0], 2),
    }


def cpu_model(cpuinfo: str) -> str:
    """The model name in the text of /proc/cpuinfo; the architecture where it has none."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The instruction sets in the text of /proc/cpuinfo, as Linux names them; none where it lists none."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
