"""How fast this machine reads memory, and how many bytes a step of the model reads: `python -m bench.peers.roofline FOLDER`.

Run in a process of its own, so that the benchmark itself needs no torch while it measures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bench.peers.candidates import threads


def measure(folder: Path) -> tuple[float, dict[str | None, int]]:
    """(bytes per second, bytes of weights that a step reads: the file's own, by None, and in float32)."""
    command = (sys.executable, "-m", "bench.peers.roofline", str(folder))
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout)
    return found["bandwidth"], {None: found["own"], "float32": found["float32"]}


def main() -> None:
    """Print one JSON object."""
    from bench.kernels import read_bandwidth, weight_bytes
    from headrace._common.model_folder import ModelFolder

    parser = argparse.ArgumentParser(prog="python -m bench.peers.roofline", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = ModelFolder.open(parser.parse_args().folder)
    print(json.dumps({
        "bandwidth": read_bandwidth(threads()), "own": weight_bytes(folder, None), "float32": weight_bytes(folder, "float32"),
    }))


if __name__ == "__main__":
    main()
