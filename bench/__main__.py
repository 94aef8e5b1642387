"""`python -m bench [NAME...]`: measure, print one table, and record what was found in bench/results.

NAME is one or more of boundary, broker, capacity, grammars, long_prompts, network, shared_prefix, speculation, startup,
stream_vs_transformers, streaming; all of them if none is given. The machine should have nothing else to do. The table's ratio
is 1 where a target is just met, and more where it is exceeded.

`python -m bench peers` compares with other servers; it takes options of its own (--help).
"""

from __future__ import annotations

import argparse
import os
import sys

from bench import boundary, broker, capacity, engine, grammars, network, startup, stream_vs_transformers, streaming
from bench.figures import Figure, recorded, table

BENCHMARKS = {
    "boundary": boundary.measure, "broker": broker.measure, "capacity": capacity.measure, "grammars": grammars.measure,
    "long_prompts": engine.long_prompts, "network": network.measure, "shared_prefix": engine.shared_prefix,
    "speculation": engine.speculation, "draft_model": engine.draft_model, "startup": startup.measure,
    "stream_vs_transformers": stream_vs_transformers.measure, "streaming": streaming.measure,
}
BUSY = 0.5  # load average from which figures are doubtful


def main() -> int:
    """The command. Exit status 1 if a target was missed."""
    if sys.argv[1:2] == ["peers"]:
        from bench.peers import command

        return command.main(sys.argv[2:])
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--no-record", action="store_true", help="leave bench/results as it is")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark is called {unknown[0]}: there are {', '.join(BENCHMARKS)}")
    if (load := os.getloadavg()[0]) > BUSY:
        print(f"warning: the load average is {load:.2f}; figures may be too bad", file=sys.stderr)
    figures: list[Figure] = []
    before: dict[str, float] = {}
    for name in given.names or BENCHMARKS:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        before |= recorded(name)
        result = BENCHMARKS[name]()
        figures += result.figures
        if not given.no_record:
            result.write()
    print(table(figures, before))
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
