"""One run: every server is started once, then they take turns, workload by workload and round by round.

So whatever the machine does meanwhile hits all of them alike. A server that waits for its turn uses no CPU; how much
other processes used during each measurement is recorded, and should be next to nothing.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from bench.peers import roofline
from bench.peers.candidates import KV_TOKENS, Candidate, threads
from bench.peers.environments import Unavailable, say
from bench.peers.models import Models
from bench.peers.rows import BUSY, FLOAT32, HEADRACE, SHARDS, Measured, needed
from bench.peers.servers import Server, Start, memory_mb, processes
from bench.peers.workloads import Invalid, Rates, Workload, answer, ask
from headrace._common.tokenizing import Tokenizer
from tests.processes import Service

WARM_UP = Workload("warm-up", 8, 32, 8)
QUIET_SECONDS, QUIET_WINDOW, QUIET_PERCENT = 10.0, 0.25, 6.0  # at most so long; of all cores, over so many seconds
SAMPLE_PROMPT, SAMPLE_TOKENS = "The capital of France is", 16
_FLAGS = {
    HEADRACE: ("--threads", str(threads())),
    FLOAT32: ("--threads", str(threads()), "--dtype", "float32"),
    SHARDS: ("--threads", "1", "--num-shard", "2"),
}
AVX2 = ("--max-cpu-isa", "avx2")


@dataclass
class Contestant:
    """A running server. `stop` ends it, once."""

    name: str
    url: str
    pid: int
    ignore_eos: bool
    stop: Callable[[], object]


@dataclass
class Contest:
    """What was found, apart from the rates: everything that a reader needs to judge them."""

    measured: Measured = field(default_factory=Measured)
    unavailable: dict[str, str] = field(default_factory=dict)  # why a peer could not be had
    invalid: list[str] = field(default_factory=list)  # measurements that do not count, and why
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)
    step_bytes: dict[str, float] = field(default_factory=dict)


class Stopped(SystemExit):  # which event loops let through
    """The process was told to stop."""


def run(
    contest: Contest, groups: Sequence[str], peers: Sequence[Candidate], rounds: int, quick: bool, avx2: bool = False
) -> None:
    """Start what is needed, measure `rounds` rounds into `contest`, stop everything. An interrupted run leaves what it has.

    `avx2`: all servers keep to AVX2.
    """
    models = Models()
    tokenizer = Tokenizer(models.source / "tokenizer.json")
    plan = needed(groups, peers)
    wanted = {name for names in plan.values() for name in names}
    with contextlib.ExitStack() as stack:
        running = _start(contest, stack, models, tokenizer, wanted, peers, avx2)
        for turn in range(rounds):
            bandwidth, sizes = roofline.measure(models.source)
            contest.measured.bandwidth.append(bandwidth)
            own = {HEADRACE: sizes[None], SHARDS: sizes[None], FLOAT32: sizes["float32"]}
            contest.step_bytes = {name: float(size) for name, size in own.items() if name in running}
            for workload, names in plan.items():
                asked = workload.quick() if quick else workload
                say(f"round {turn + 1} of {rounds}: {workload.name}")
                for name in _rotated([name for name in names if name in running], turn):
                    label = f"{turn} {BUSY}" if name == BUSY else f"{turn}"  # its server has seen the prompts of the quiet one
                    prompts = asked.prompts(tokenizer, label)
                    contest.measured.add(name, workload, _measure(contest, running[name], asked, prompts))
            for name, contestant in running.items():
                if memory := memory_mb(contestant.pid):  # it may have died
                    contest.servers[name]["memory_mb"] = round(memory)


def _start(
    contest: Contest, stack: contextlib.ExitStack, models: Models, tokenizer: Tokenizer, wanted: set[str],
    peers: Sequence[Candidate], avx2: bool,
) -> dict[str, Contestant]:
    """Everything that runs, warmed up, by name. Peers that cannot be had are recorded; without Headrace there is no contest."""
    starts = {}
    for peer in peers:  # all that has to be installed is, before the first server starts
        if peer.name in wanted:
            with _recorded(contest, peer.name):
                starts[peer] = peer.start(models, avx2)
    running = {name: _start_own(contest, stack, name, avx2) for name in _FLAGS if name in wanted}
    for peer, start in starts.items():
        with _recorded(contest, peer.name):
            running[peer.name] = _start_peer(contest, stack, peer, start)
    prompts, sample = WARM_UP.prompts(tokenizer, ""), tokenizer.encode(SAMPLE_PROMPT)
    for name, contestant in list(running.items()):
        with _recorded(contest, name):
            ask(contestant.url, WARM_UP, prompts, contestant.ignore_eos)
            contest.servers[name]["answer"] = answer(contestant.url, sample, SAMPLE_TOKENS, contestant.ignore_eos)
        if name in contest.unavailable:
            running.pop(name).stop()
    if BUSY in wanted and HEADRACE in running:
        running[BUSY] = replace(running[HEADRACE], name=BUSY)
        contest.servers[BUSY] = {}
    return running


@contextlib.contextmanager
def _recorded(contest: Contest, name: str) -> Iterator[None]:
    """Make a note of why a server cannot take part, and go on without it."""
    try:
        yield
    except (Unavailable, Invalid) as error:
        contest.unavailable[name] = str(error)
        say(f"{name} is not available: {error}")


def _start_own(contest: Contest, stack: contextlib.ExitStack, name: str, avx2: bool) -> Contestant:
    say(f"starting {name}")
    began = time.monotonic()
    service = Service(*_FLAGS[name], *(AVX2 if avx2 else ()), "--max-batch-total-tokens", str(KV_TOKENS))
    stack.callback(service.stop)
    service.wait_ready()
    contest.servers[name] = {"start_s": round(time.monotonic() - began, 1)}
    return Contestant(name, service.url, service.popen.pid, False, service.stop)


def _start_peer(contest: Contest, stack: contextlib.ExitStack, peer: Candidate, start: Start) -> Contestant:
    say(f"starting {peer.name}")
    server = Server(start)
    stack.callback(server.stop)
    try:
        seconds = server.wait_ready()
    except Unavailable:
        server.stop()
        raise
    contest.servers[peer.name] = {"start_s": round(seconds, 1), "weights": peer.weights, "note": peer.note}
    return Contestant(peer.name, server.url, server.pid, peer.ignore_eos, server.stop)


def _measure(contest: Contest, contestant: Contestant, workload: Workload, prompts: Sequence[list[int]]) -> Rates | None:
    """One measurement; None if it does not count."""
    wait_until_quiet()
    busy = busy_process() if contestant.name == BUSY else contextlib.nullcontext()
    before = _cpu(contestant.pid)
    began = time.monotonic()
    try:
        with busy:
            found = ask(contestant.url, workload, prompts, contestant.ignore_eos)
    except Invalid as error:
        contest.invalid.append(f"{contestant.name}, {workload.name}: {error}")
        say(f"  {contestant.name}: does not count: {error}")
        return None
    seconds = time.monotonic() - began
    after = _cpu(contestant.pid)
    others = max(0.0, (after[0] - before[0]) - (after[1] - before[1])) / seconds
    if contestant.name != BUSY:
        server = contest.servers[contestant.name]
        server["most_other_cpu"] = max(server.get("most_other_cpu", 0.0), round(others, 2))
    shown = found.prefill or found.output
    decode = f", decode {found.decode:.1f}" if found.decode else ""
    say(f"  {contestant.name}: {shown:.1f} tokens/s{decode} (other processes: {others:.2f} cores)")
    return found


def wait_until_quiet() -> None:
    """Wait until next to nothing uses the CPU: some servers' threads spin for a second after their last request."""
    deadline = time.monotonic() + QUIET_SECONDS
    while psutil.cpu_percent(QUIET_WINDOW) > QUIET_PERCENT and time.monotonic() < deadline:
        pass


def _cpu(pid: int) -> tuple[float, float]:
    """CPU seconds of the whole machine, and those of one server and of this process."""
    times = psutil.cpu_times()
    own = psutil.Process().cpu_times()
    spent = own.user + own.system
    for process in processes(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            mine = process.cpu_times()
            spent += mine.user + mine.system
    return times.user + times.nice + times.system + times.irq + times.softirq, spent


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """Another process that wants a whole core."""
    popen = subprocess.Popen([sys.executable, "-c", "while True: pass"], process_group=0)
    try:
        yield
    finally:
        popen.kill()
        popen.wait()


def _rotated(names: list[str], turn: int) -> list[str]:
    """Another one begins in each round."""
    first = turn % len(names) if names else 0
    return names[first:] + names[:first]


def raise_stopped(*_: object) -> None:
    """A signal handler that lets everything be stopped in order."""
    raise Stopped
