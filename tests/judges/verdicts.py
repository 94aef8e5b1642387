"""Runs judges and keeps what they said, for the tests and for docs/compatibility.md."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

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


def run_python(judge: str, *given: str, torch: bool = False, seconds: float = 600) -> list[Verdict]:
    """Run tests/judges/JUDGE/judge.py in its environment."""
    interpreter = environments.python(judge, torch=torch)
    return _run([str(interpreter), str(environments.HERE / judge / "judge.py"), *given], seconds)


def run_node(judge: str, *given: str, seconds: float = 600) -> list[Verdict]:
    """Run tests/judges/JUDGE/judge.mjs with its packages; the folder that holds them is its last argument."""
    folder = environments.node(judge)
    return _run(["node", str(environments.HERE / judge / "judge.mjs"), *given, str(folder)], seconds)


def _run(command: list[str], seconds: float) -> list[Verdict]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    verdicts = [Verdict(line["check"], line["ok"], line.get("why", "")) for line in lines]
    if done.returncode or not verdicts:
        verdicts.append(Verdict("the script ends well", ok=False, why=(done.stderr or done.stdout)[-2000:]))
    return verdicts


def package(judge: str) -> str:
    """The judge's package and version."""
    folder = environments.HERE / judge
    if (folder / "package.json").exists():
        wanted = json.loads((folder / "package.json").read_text("utf-8"))["dependencies"]
        return ", ".join(f"{name} {version} (npm)" for name, version in wanted.items())
    lines = (folder / "requirements.txt").read_text("utf-8").split()
    return ", ".join(line.replace("==", " ") for line in lines)


def write_table(verdicts: dict[str, list[Verdict]]) -> None:
    """Put the judges' verdicts into docs/compatibility.md."""
    rows = ["| judge | checks passed | checks |", "|---|---|---|"]
    for judge, found in sorted(verdicts.items()):
        passed = sum(verdict.ok for verdict in found)
        names = "; ".join(v.check if v.ok else f"**fails:** {v.check}" for v in found)
        rows.append(f"| {package(judge)} | {passed} of {len(found)} | {names} |")
    text = TABLE.read_text("utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    TABLE.write_text(f"{before}{BEGIN}\n" + "\n".join(rows) + f"\n{END}{after}", "utf-8")
