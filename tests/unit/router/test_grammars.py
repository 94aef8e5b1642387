"""The router's check of grammars: off the event loop, remembered, bounded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest

from headrace._common.errors import Overloaded
from headrace._common.grammars import Grammar, GrammarError
from headrace_router import grammars
from headrace_router.grammars import GrammarChecker

OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1200)}}


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    made.close()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    """Every grammar that is compiled."""
    seen: list[Grammar] = []
    whole = GrammarChecker._try

    def count(self: GrammarChecker, grammar: Grammar) -> None:
        seen.append(grammar)
        whole(self, grammar)

    monkeypatch.setattr(GrammarChecker, "_try", count)
    return seen


async def test_an_outcome_is_found_once(checker: GrammarChecker, compiled: list[Grammar]) -> None:
    good, bad = Grammar("json_schema", '{"type": "integer"}'), Grammar("json_schema", '{"contains": {}}')
    await asyncio.gather(*(checker.check(good) for _ in range(5)))
    for _ in range(3):
        await checker.check(Grammar(good.kind, str(good.source)))
        with pytest.raises(GrammarError, match="contains"):
            await checker.check(bad)
    assert compiled == [good, bad]


async def test_few_outcomes_are_kept(
    checker: GrammarChecker, compiled: list[Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "KEPT", 2)
    for pattern in ("a", "b", "a", "c", "a", "b"):
        await checker.check(Grammar("regex", pattern))
    assert [g.source for g in compiled] == ["a", "b", "c", "b"]


@pytest.mark.parametrize(("grammar", "words"), [
    (Grammar("json_schema", json.dumps(OPTIONAL)), "items"), (Grammar("regex", "(a{1000}){1000}"), "too many expressions"),
    (Grammar("json_schema", json.dumps({"allOf": [
        {"anyOf": [{"properties": {f"a{i}{j}": {"type": "integer"}}} for j in range(3)]} for i in range(10)
    ]})), "too large"),
])
async def test_what_explodes_is_refused(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, grammar: Grammar, words: str
) -> None:
    monkeypatch.setattr(grammars, "WAIT_SECONDS", 60.0)  # the machine may be busy
    with pytest.raises(GrammarError, match=words):
        await checker.check(grammar)


async def test_the_event_loop_goes_on_while_one_compiles(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = True

    def slow(self: GrammarChecker, grammar: Grammar) -> None:
        while blocked:
            time.sleep(0.001)

    monkeypatch.setattr(GrammarChecker, "_try", slow)
    first = asyncio.create_task(checker.check(Grammar("regex", "x")))
    second = asyncio.create_task(checker.check(Grammar("regex", "x")))
    await asyncio.sleep(0.02)
    first.cancel()  # its work is not lost for the others
    await asyncio.sleep(0)
    assert not second.done()
    blocked = False
    await second


async def test_a_wait_has_an_end(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Grammar] = []

    def slow(self: GrammarChecker, grammar: Grammar) -> None:
        time.sleep(0.2)
        done.append(grammar)

    monkeypatch.setattr(grammars, "WAIT_SECONDS", 0.02)
    monkeypatch.setattr(GrammarChecker, "_try", slow)
    with pytest.raises(Overloaded, match="grammars"):
        await checker.check(Grammar("regex", "x"))
    assert not done
