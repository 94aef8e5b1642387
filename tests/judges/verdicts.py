"""Runs judges and keeps what they said, for the tests and for docs/compatibility.md."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.judges import environments

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/compatibility.md"
BEGIN, END = "<!-- verdicts: written by `make judges` -->", "<!-- end of verdicts -->"


@dataclass(frozen=True)
class Verdict:
    """One check of a judge."""

    check: str
    ok: bool
    why: str = ""
    skipped: str = ""  # why it was not asked for


def run_python(judge: str, *given: str, torch: bool = False, seconds: float = 600) -> list[Verdict]:
    """Run tests/judges/JUDGE/judge.py in its environment."""
    interpreter = environments.python(judge, torch=torch)
    return _run([str(interpreter), str(environments.HERE / judge / "judge.py"), *given], seconds)


def said_by_python(judge: str, *given: str) -> Any:
    """What tests/judges/JUDGE/judge.py prints as JSON when it is to prepare something."""
    command = [str(environments.python(judge)), str(environments.HERE / judge / "judge.py"), *given]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout)


def run_node(judge: str, *given: str, seconds: float = 600) -> list[Verdict]:
    """Run tests/judges/JUDGE/judge.mjs with its packages; the folder that holds them is its last argument."""
    folder = environments.node(judge)
    return _run(["node", str(environments.HERE / judge / "judge.mjs"), *given, str(folder)], seconds)


def _run(command: list[str], seconds: float) -> list[Verdict]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    verdicts = [Verdict(line["check"], line.get("ok", True), line.get("why", ""), line.get("skipped", "")) for line in lines]
    if done.returncode or not verdicts:
        verdicts.append(Verdict("the script ends well", ok=False, why=(done.stderr or done.stdout)[-2000:]))
    return verdicts


def package(judge: str) -> str:
    """The judge's package and version."""
    folder = environments.HERE / judge
    if (folder / "package.json").exists():
        wanted = json.loads((folder / "package.json").read_text("utf-8"))["dependencies"]
        return ", ".join(f"{name} {version} (npm)" for name, version in wanted.items())
    alone = folder / "alone.txt"
    lines = (alone if alone.exists() else folder / "requirements.txt").read_text("utf-8").split()
    return ", ".join(line.replace("==", " ") for line in lines)


def write_table(verdicts: dict[str, list[Verdict]]) -> None:
    """Put the judges' verdicts into docs/compatibility.md; the rows of those that were not run stay."""
    before, rest = TABLE.read_text("utf-8").split(BEGIN)
    table, after = rest.split(END)
    head, rule, *old = table.strip().splitlines()
    rows = {_judges(row): row for row in old}
    for judge, found in verdicts.items():
        asked = [verdict for verdict in found if not verdict.skipped]
        names = [v.check if v.ok else f"**fails:** {v.check}" for v in asked]
        names += [f"not asked for: {v.check} ({v.skipped})" for v in found if v.skipped]
        row = f"| {package(judge)} | {sum(v.ok for v in asked)} of {len(asked)} | {grouped(names)} |"
        rows[_judges(row)] = row
    lines = [head, rule, *(row for _, row in sorted(rows.items()))]
    TABLE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}", "utf-8")


def grouped(names: list[str]) -> str:
    """Names that begin alike, up to a colon, after one another as one: "chat: a", "chat: b" become "chat: a, b"."""
    out: list[str] = []
    last = ""
    for name in names:
        head, colon, rest = name.partition(": ")
        if colon and head == last:
            out[-1] += f", {rest}"
        else:
            out.append(name)
        last = head if colon else ""
    return "; ".join(out)


def _judges(row: str) -> str:
    """The packages that a row is of, without their versions."""
    return re.sub(r" \d\S*(?=,| )", "", row.split("|")[1]).strip()
