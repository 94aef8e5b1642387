"""`headrace quantize`: a packed copy of a model, made by a child process, because torch is needed for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headrace._common.errors import StartupError
from headrace_launcher.private import new_folder


def quantize(model: Path, output: Path, to: str) -> None:
    """Write the packed copy of a model folder to `output`, whole or not at all.

    Raises:
        StartupError: `output` exists, cannot be made, or the model cannot be packed.
    """
    if output.exists():
        raise StartupError(f"{output} exists already")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(output) as scratch:
            command = [sys.executable, "-m", "headrace_shard.quantize", str(model), str(scratch), "--quantize", to]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
                raise StartupError(f"{model} cannot be packed: {lines[-1].removeprefix('error: ')}")
    except OSError as error:
        raise StartupError(f"cannot write {output}: {error.strerror}") from None
