"""What a judge's script is made of: named checks, each of which prints one line of JSON. Needs nothing but Python.

A script runs in the judge's own environment as `python judge.py URL MODEL`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

_checks: list[tuple[str, Callable[[], Any]]] = []


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function, plain or async, as a check of this name; it fails by raising."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _checks.append((name, function))
        return function

    return add


def raises(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """The error of this kind that the call raises."""
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {result!r}")


def run() -> None:
    """Run all checks in the order of their registration."""
    for name, function in _checks:
        try:
            if inspect.iscoroutinefunction(function):
                asyncio.run(function())
            else:
                function()
        except Exception as error:  # noqa: BLE001 - whatever a client raises is its verdict
            where = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in where if frame.filename == sys.argv[0]] or list(where)
            why = f"{type(error).__name__}: {error} (line {own[-1].lineno}: {own[-1].line})"
            print(json.dumps({"check": name, "ok": False, "why": why[:2000]}), flush=True)
        else:
            print(json.dumps({"check": name, "ok": True}), flush=True)
