"""`python -m bench peers`: Headrace beside llama.cpp, OpenVINO GenAI, CTranslate2, transformers and vLLM on this CPU.

Every peer is installed into an environment of its own under the cache folder ($HEADRACE_CACHE, else ~/.cache/headrace);
one that cannot be had is named with the reason, and the run goes on. All serve the same model, over HTTP, with all
cores; they take turns, round after round. A full run (about an hour) writes peers.json, peers.md and peers.svg into
bench/results, or with --avx2 peers_avx2.*; one that is stopped earlier, or has --quick, --peers or --only, prints its
tables alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.figures import RESULTS, Result, recorded, table
from bench.peers import environments, report
from bench.peers.candidates import PEERS, Candidate
from bench.peers.contest import Contest, Stopped, raise_stopped, run
from bench.peers.environments import Unavailable, say
from bench.peers.models import Models
from bench.peers.rows import GROUPS

ROUNDS = 5
PLOT_SECONDS = 120.0


def main(arguments: Sequence[str]) -> int:
    """The command. Exit status 1 if a target was missed."""
    names = tuple(dict.fromkeys(peer.peer for peer in PEERS))
    parser = argparse.ArgumentParser(
        prog="python -m bench peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", metavar="LIST", help=f"only these, with commas between them: {', '.join(names)}; or none")
    parser.add_argument("--only", metavar="LIST", help=f"only these rows: {', '.join(GROUPS)}")
    parser.add_argument("--runs", type=int, default=None, metavar="N", help=f"rounds; medians of so many (default {ROUNDS})")
    parser.add_argument("--avx2", action="store_true", help="all keep to AVX2, as on a CPU without wider instructions")
    parser.add_argument("--quick", action="store_true", help="one round of shorter answers, to see that everything works")
    parser.add_argument("--install", action="store_true", help="only install and convert what is needed")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the record, tables and plot there")
    given = parser.parse_args(arguments)
    groups = _chosen(parser, "--only", given.only, GROUPS)
    chosen = () if given.peers == "none" else _chosen(parser, "--peers", given.peers, names)
    peers = [peer for peer in PEERS if peer.peer in chosen]
    rounds = given.runs if given.runs is not None else 1 if given.quick else ROUNDS
    if rounds < 1:
        parser.error("--runs must be at least 1")
    signal.signal(signal.SIGTERM, raise_stopped)
    if given.install:
        return install(peers, given.avx2)
    before = recorded(report.name(given.avx2))
    found, whole = Contest(), False
    try:
        run(found, groups, peers, rounds, given.quick, given.avx2)
        whole = not (given.quick or given.peers or given.only)
    except (KeyboardInterrupt, Stopped):
        say(f"stopped in round {len(found.measured.bandwidth)} of {rounds}")
    result = report.result(found, groups, peers, rounds, given.quick, given.avx2)
    print(report.markdown(result.to_json()))
    print(table(result.figures, before))
    folder = given.out or (RESULTS if whole else None)
    if folder is not None and result.details["tokens_per_s"]:
        write(result, folder)
    return 0 if all(figure.met for figure in result.figures) else 1


def _chosen(parser: argparse.ArgumentParser, option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """The names in a list with commas; all if it is not given."""
    if text is None:
        return tuple(known)
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{option}: {unknown[0]!r} is none of {', '.join(known)}")
    return names


def install(peers: Sequence[Candidate], avx2: bool) -> int:
    """Prepare everything that these peers need. Exit status 1 if one cannot be had."""
    models = Models()
    status = 0
    try:
        environments.ensure("plot")
    except Unavailable as error:
        say(f"no plot: {error}")
    for peer in peers:
        try:
            peer.start(models, avx2)
            print(f"{peer.name}: ready")
        except Unavailable as error:
            print(f"{peer.name}: not available: {error}")
            status = 1
    return status


def write(result: Result, folder: Path) -> None:
    """The record, its tables, and the plot if matplotlib can be had."""
    folder.mkdir(parents=True, exist_ok=True)
    record = result.write(folder)
    record.with_suffix(".md").write_text(report.markdown(json.loads(record.read_text("utf-8"))), "utf-8")
    try:
        python = environments.ensure("plot").python
        script = Path(__file__).with_name("plot.py")
        environments.run_bounded((str(python), str(script), str(record), str(record.with_suffix(".svg"))), PLOT_SECONDS)
    except Unavailable as error:
        say(f"no plot: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
