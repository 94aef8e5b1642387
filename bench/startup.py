"""How fast the service is there, and what it costs while nobody uses it: the embedded model, from the cache."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import tempfile
import time
from pathlib import Path

from bench.figures import Figure, Result
from bench.processes import RouterProcess, ScriptedShard, child_of, cpu_between, cpu_seconds, embedded_model, rss_mb
from headrace_launcher.bench.stats import median
from tests.processes import START, Service

STARTS = 3
SETTLE_SECONDS = 5.0
IDLE_SECONDS = 20.0
_POLL = 0.02
_BREAKDOWN = re.compile(r"\(ready after (.*)\)")


def measure() -> Result:
    """Start everything several times, and watch the last service idle."""
    setup = {"starts": STARTS, "idle_seconds": IDLE_SECONDS, "settle_seconds": SETTLE_SECONDS}
    folder = embedded_model()
    result = Result("startup", setup=setup)
    router_seconds, router_rss = router_starts(folder)
    firsts: list[float] = []
    breakdowns = []
    for start in range(STARTS):
        began = time.perf_counter()
        service = Service()
        try:
            firsts.append(first_token(service) - began)
            breakdowns.append(breakdown(service.log()))
            if start == STARTS - 1:
                router_rss.append(rss_mb(child_of(service.popen.pid, "headrace_router")))
                idle = idle_percent(service.popen.pid)
        finally:
            service.stop()
    result.figures = [
        Figure("start to first token", "s", median(firsts), below=8, samples=tuple(firsts)),
        Figure("router process start", "s", median(router_seconds), below=2, samples=tuple(router_seconds)),
        Figure("router process memory", "MB", max(router_rss), below=200, samples=tuple(router_rss)),
        Figure("idle CPU of the service", "% of a core", idle, below=2),
    ]
    result.details = {"breakdown": breakdowns}
    return result


def router_starts(folder: Path) -> tuple[list[float], list[float]]:
    """(seconds from the start of the process to its first answer, memory in MB then) of each start."""
    seconds, memory = [], []
    sockets = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    shard = ScriptedShard(sockets)
    try:
        _until_listening(shard)
        for _ in range(STARTS):
            began = time.perf_counter()
            router = RouterProcess(folder, shard.target)
            try:
                router.wait_ready()
                seconds.append(time.perf_counter() - began)
                memory.append(rss_mb(router.popen.pid))
            finally:
                router.stop()
    finally:
        shard.stop()
        shutil.rmtree(sockets)
    return seconds, memory


def _until_listening(shard: ScriptedShard) -> None:
    end = time.monotonic() + START
    while "ready" not in shard.log():
        shard.check_alive()
        assert time.monotonic() < end
        time.sleep(_POLL)


def first_token(service: Service) -> float:
    """Ask until the service streams a token; time.perf_counter() at which it came."""
    body = json.dumps({"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}})
    end = time.monotonic() + START
    while time.monotonic() < end:
        service.check_alive()
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=START)
        try:
            connection.request("POST", "/generate_stream", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status == 200 and response.readline().startswith(b"data:"):
                at = time.perf_counter()
                response.read()
                return at
        except (OSError, http.client.HTTPException):
            pass  # does not listen yet
        finally:
            connection.close()
        time.sleep(_POLL)
    raise TimeoutError(service.log())


def breakdown(log: str) -> str:
    """What the launcher's ready line says of the start; "" if there is none yet."""
    found = _BREAKDOWN.search(log)
    return found[1] if found else ""


def idle_percent(pid: int) -> float:
    """CPU time of a process tree that nobody asks anything, in percent of one core.

    Raises:
        RuntimeError: a process of it ended meanwhile.
    """
    time.sleep(SETTLE_SECONDS)
    before, began = cpu_seconds(pid), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    after, seconds = cpu_seconds(pid), time.perf_counter() - began
    return cpu_between(before, after) / seconds * 100
