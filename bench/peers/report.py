"""What a contest found, as bench/results keeps it: a record, a Markdown table, and the data of the plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.figures import Result, short
from bench.peers.candidates import LLAMA_SOURCE, Candidate, threads
from bench.peers.contest import Contest
from bench.peers.rows import COLUMNS, OWN, ratio_figures, roofline_figures
from headrace_launcher.bench.stats import median

DOUBTFUL_CORES = 0.1  # used by other processes during a measurement, above which it says little


def name(avx2: bool) -> str:
    """The record's name, which is that of its files."""
    return "peers_avx2" if avx2 else "peers"


def result(
    contest: Contest, groups: Sequence[str], peers: Sequence[Candidate], rounds: int, quick: bool, avx2: bool = False
) -> Result:
    """The record."""
    figures = ratio_figures(contest.measured, groups, peers)
    figures += roofline_figures(contest.measured, contest.step_bytes)
    setup = {"threads": threads(), "rounds": rounds, "quick": quick, "avx2": avx2, "llama.cpp": LLAMA_SOURCE}
    details = {
        "tokens_per_s": rates(contest, peers), "servers": contest.servers, "unavailable": contest.unavailable,
        "invalid": contest.invalid,
        "read_bandwidth_gb_s": [round(value / 1e9, 2) for value in contest.measured.bandwidth],
        "step_mb": {name: round(size / 1e6, 1) for name, size in contest.step_bytes.items()},
    }
    return Result(name(avx2), figures, setup, details)


def rates(contest: Contest, peers: Sequence[Candidate]) -> dict[str, dict[str, dict[str, Any]]]:
    """server -> column -> median and values of the rounds, tokens per second."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for server in (*OWN, *(peer.name for peer in peers)):
        for column in COLUMNS:
            values = contest.measured.values(server, column)
            if any(value is not None for value in values):
                rounded = [None if value is None else short(value) for value in values]
                middle = median([value for value in values if value is not None])
                found.setdefault(server, {})[column.title] = {"median": short(middle), "rounds": rounded}
    return found


def markdown(record: dict[str, Any]) -> str:
    """The record as two tables: tokens per second of every server, and the ratios."""
    details = record["details"]
    titles = [c.title for c in COLUMNS if any(c.title in row for row in details["tokens_per_s"].values())]
    lines = [_line(["tokens/s", *titles, "memory, MB"]), _line(["---", *("---:" for _ in titles), "---:"])]
    for server, row in details["tokens_per_s"].items():
        cells = [f"{row[title]['median']:g}" if title in row else "–" for title in titles]
        memory = details["servers"].get(server, {}).get("memory_mb")
        lines.append(_line([server, *cells, "–" if memory is None else str(memory)]))
    lines += ["", _line(["ratio", "measured", "target"]), _line(["---", "---:", "---:"])]
    lines += [_line([f["name"], f"{f['measured']:.2f}", f["target"] or "–"]) for f in record["figures"]]
    if details["unavailable"]:
        lines += ["", "Not measured: " + "; ".join(f"{name} ({why})" for name, why in details["unavailable"].items()) + "."]
    if details["invalid"]:
        lines += ["", "Does not count: " + "; ".join(details["invalid"]) + "."]
    others = {name: server.get("most_other_cpu", 0.0) for name, server in details["servers"].items()}
    if doubtful := [f"{name} ({cores:g})" for name, cores in others.items() if cores > DOUBTFUL_CORES]:
        lines += ["", f"Doubtful, since other processes used the CPU meanwhile (cores): {', '.join(doubtful)}."]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
