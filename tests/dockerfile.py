"""The Dockerfile as data, for tests on machines without docker."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KNOWN = {
    "FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD",
}


@dataclass(frozen=True)
class Instruction:
    """One instruction with its line joined."""

    name: str
    value: str

    @property
    def words(self) -> list[str]:
        """The arguments: a JSON array, or words as the shell cuts them."""
        return [str(w) for w in json.loads(self.value)] if self.value.startswith("[") else shlex.split(self.value)


def read(path: Path = ROOT / "Dockerfile") -> list[Instruction]:
    """The instructions in order.

    Raises:
        ValueError: a line is none.
    """
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", path.read_text()))
    made = []
    for line in filter(str.strip, text.splitlines()):
        name, _, value = line.strip().partition(" ")
        if name not in KNOWN:
            raise ValueError(f"not an instruction: {line}")
        made.append(Instruction(name, " ".join(value.split()) if name != "RUN" else value.strip()))
    return made


def health_command(value: str) -> list[str]:
    """The command of a HEALTHCHECK."""
    return [str(w) for w in json.loads(value.partition("CMD")[2])]
