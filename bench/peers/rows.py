"""The rows of the comparison: what is compared with what, and which ratio is the target. No measuring here.

A ratio is taken round by round, so that what the machine does to both sides of a round cancels out; the median counts.
The best peer of a row is the one with the best median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bench.figures import Figure
from bench.peers.candidates import Candidate
from bench.peers.workloads import EIGHT, LONG_PROMPT, MANY, ONE, SHORT_PROMPT, Rates, Workload
from headrace_launcher.bench.stats import median

HEADRACE, FLOAT32, SHARDS, BUSY = "Headrace", "Headrace float32", "Headrace, 2 shards", "Headrace, one core busy"
OWN = (HEADRACE, FLOAT32, SHARDS, BUSY)


@dataclass(frozen=True)
class Column:
    """One rate of one workload, tokens per second."""

    title: str
    workload: Workload
    rate: Literal["output", "decode", "prefill"]

    def of(self, rates: Rates) -> float | None:
        """This column's number among those of a measurement."""
        value: float | None = getattr(rates, self.rate)
        return value


DECODE = Column("1 stream, decode", ONE, "decode")
OUTPUT = Column("1 stream", ONE, "output")
OUTPUT_8 = Column("8 streams", EIGHT, "output")
OUTPUT_32 = Column("32 streams", MANY, "output")
PREFILL = Column("prefill 128", SHORT_PROMPT, "prefill")
PREFILL_2000 = Column("prefill 2000", LONG_PROMPT, "prefill")
COLUMNS = (DECODE, OUTPUT, OUTPUT_8, OUTPUT_32, PREFILL, PREFILL_2000)

_Choice = Callable[[Candidate], bool]


@dataclass(frozen=True)
class Row:
    """`ours` against the best of some peers (`peers`) or against another way of running Headrace (`other`)."""

    group: str  # its name for --only
    column: Column
    ours: str
    against: str
    at_least: float | None
    peers: _Choice | None = None
    other: str = ""

    @property
    def name(self) -> str:
        """As it is printed."""
        own = "" if self.ours == HEADRACE else self.ours.removeprefix(HEADRACE).strip(", ") + ": "
        return f"{own}{self.column.title} / {self.against}"


def _any(_: Candidate) -> bool:
    return True


def _exact(candidate: Candidate) -> bool:
    return candidate.exact


ROWS = (
    Row("one-stream", DECODE, HEADRACE, "llama.cpp, same file", 2.0, lambda c: c.name == "llama.cpp Q4_1"),
    Row("one-stream", DECODE, HEADRACE, "llama.cpp, best format", 1.8, lambda c: c.peer == "llama.cpp"),
    Row("one-stream", DECODE, HEADRACE, "best peer", None, _any),
    Row("one-stream", OUTPUT, HEADRACE, "best peer", None, _any),
    Row("eight-streams", OUTPUT_8, HEADRACE, "best peer", 2.5, _any),
    Row("many-streams", OUTPUT_32, HEADRACE, "best peer", 2.0, _any),
    Row("prefill", PREFILL, HEADRACE, "best peer", 2.2, _any),
    Row("prefill", PREFILL_2000, HEADRACE, "best peer", 1.6, _any),
    Row("exact", DECODE, FLOAT32, "best float32 peer", 1.3, _exact),
    Row("exact", OUTPUT_8, FLOAT32, "best float32 peer", 1.0, _exact),
    Row("exact", OUTPUT_32, FLOAT32, "best float32 peer", 1.0, _exact),
    Row("shards", DECODE, SHARDS, "one process", 0.9, other=HEADRACE),
    Row("shards", OUTPUT_8, SHARDS, "one process", 0.9, other=HEADRACE),
    Row("busy", DECODE, BUSY, "quiet", 0.4, other=HEADRACE),
    Row("busy", OUTPUT_8, BUSY, "quiet", 0.4, other=HEADRACE),
)
GROUPS = tuple(dict.fromkeys(row.group for row in ROWS))
ROOFLINE_TARGET = {(HEADRACE, DECODE): 0.7}


@dataclass
class Measured:
    """Rates of every round, by (server, workload); None where a measurement was not valid."""

    rates: dict[tuple[str, Workload], list[Rates | None]] = field(default_factory=dict)
    bandwidth: list[float] = field(default_factory=list)  # bytes per second of each round

    def add(self, server: str, workload: Workload, rates: Rates | None) -> None:
        """Record the next round."""
        self.rates.setdefault((server, workload), []).append(rates)

    def values(self, server: str, column: Column) -> list[float | None]:
        """One column of one server, by round; empty if it was not measured."""
        return [None if rates is None else column.of(rates) for rates in self.rates.get((server, column.workload), [])]

    def median(self, server: str, column: Column) -> float | None:
        """The median of its valid rounds."""
        valid = [value for value in self.values(server, column) if value is not None]
        return median(valid) if valid else None

    def best(self, servers: Iterable[str], column: Column) -> str | None:
        """The server with the best median; None if none has one."""
        found = {server: value for server in servers if (value := self.median(server, column)) is not None}
        return max(found, key=lambda server: found[server]) if found else None


def needed(groups: Sequence[str], peers: Sequence[Candidate]) -> dict[Workload, list[str]]:
    """The servers that each workload is measured on for these groups, Headrace's own first."""
    servers: dict[Workload, set[str]] = {}
    for row in ROWS:
        if row.group in groups:
            names = {row.ours, row.other} if row.other else {row.ours, *(p.name for p in peers if row.peers and row.peers(p))}
            servers.setdefault(row.column.workload, set()).update(names)
    order = [*OWN, *(peer.name for peer in peers)]
    return {workload: sorted(names, key=order.index) for workload, names in servers.items()}


def ratio_figures(measured: Measured, groups: Sequence[str], peers: Sequence[Candidate]) -> list[Figure]:
    """The ratio of each row of these groups that has both sides."""
    figures = []
    for row in ROWS:
        if row.group not in groups:
            continue
        others = [row.other] if row.other else [peer.name for peer in peers if row.peers and row.peers(peer)]
        other = measured.best(others, row.column)
        if other is None or measured.median(row.ours, row.column) is None:
            continue
        name = f"{row.name} ({other})" if "best" in row.against else row.name
        if ratios := _paired(measured.values(row.ours, row.column), measured.values(other, row.column)):
            figures.append(Figure(name, "x", median(ratios), at_least=row.at_least, samples=tuple(ratios)))
    return figures


def _paired(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Ratios of the rounds in which both are valid; a run that was stopped has one more of some."""
    return [a / b for a, b in zip(ours, theirs, strict=False) if a is not None and b]


def roofline_figures(measured: Measured, step_bytes: dict[str, float], columns: Sequence[Column] = COLUMNS) -> list[Figure]:
    """What share of the rate at which the machine can read the weights each of ours reaches.

    `step_bytes`: bytes of weights that one step reads, by server. A step makes one token for each stream, so that the
    roof of n streams is n times as high; with many of them arithmetic ends earlier. Prefill has no such roof.
    """
    figures = []
    for server, size in step_bytes.items():
        for column in columns:
            if column.rate == "prefill":
                continue
            shares = [
                value / (column.workload.streams * bandwidth / size)
                for value, bandwidth in zip(measured.values(server, column), measured.bandwidth, strict=False)
                if value is not None
            ]
            if shares:
                own = server.removeprefix(HEADRACE).strip(", ")
                name = f"{own + ': ' if own else ''}{column.title} / reading the weights"
                target = ROOFLINE_TARGET.get((server, column))
                figures.append(Figure(name, "x", median(shares), at_least=target, samples=tuple(shares)))
    return figures
