"""Stop strings: the same result however the text is cut into pieces."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace_router.text.stops import StopFinder

texts = st.text("ab\u00e9", max_size=30)
stop_lists = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in pairwise(edges)]


def expected(text: str, stops: tuple[str, ...], keep: bool) -> tuple[str, bool]:
    """By plain search: the first place where some stop string is complete; of several there, the longest."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end if keep else end - max(map(len, done))], True
    return text, False


@given(texts, stop_lists, st.booleans(), st.lists(st.integers(0, 30)))
def test_any_split_gives_the_same_text(text: str, stops: tuple[str, ...], keep: bool, places: list[int]) -> None:
    finder = StopFinder(stops, keep)
    out = [finder.push(piece) for piece in cut(text, places)]
    found = finder.found is not None
    assert ("".join(out) + finder.flush(), found) == expected(text, stops, keep)


@given(texts, stop_lists, st.lists(st.integers(0, 30)))
def test_only_what_can_become_a_stop_string_is_held_back(
    text: str, stops: tuple[str, ...], places: list[int]
) -> None:
    finder, seen, out = StopFinder(stops, keep=False), "", ""
    for piece in cut(text, places):
        out += finder.push(piece)
        seen += piece
        if finder.found is not None:
            return
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_kept_stop_string_is_the_end_of_its_piece() -> None:
    finder = StopFinder(("END",), keep=True)
    assert [finder.push(piece) for piece in ("a E", "ND and more", "never")] == ["a E", "ND", ""]


def test_a_huge_stop_string_costs_nothing() -> None:
    start = time.perf_counter()
    finder = StopFinder(("a" * 1_000_000 + "b",), keep=False)
    for _ in range(100):
        assert finder.push("aaaa") == ""
    assert finder.push("c") == "a" * 400 + "c"
    assert time.perf_counter() - start < 0.5
