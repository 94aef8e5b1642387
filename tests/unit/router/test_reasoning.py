"""Thoughts and answers told apart, however the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_router.text.message import MessageReader
from headrace_router.text.parts import Arguments, CallBegin, Part, Reasoning, Text
from headrace_router.text.reasoning import TAGS, ReasoningReader, choose, is_begun
from headrace_router.text.tools.json_calls import Hermes

THINK = TAGS["think"]
CASES = [
    ("<think>\nhm\n</think>\n\nyes", False, [Reasoning("hm"), Text("yes")]),
    ("\n<think>hm</think>yes ", False, [Reasoning("hm"), Text("yes ")]),
    ("hm</think> yes", True, [Reasoning("hm"), Text("yes")]),
    ("just hm", True, [Reasoning("just hm")]),
    ("yes <think>no</think>", False, [Text("yes <think>no</think>")]),
    ("<think></think>yes", False, [Text("yes")]),
    ("a < b </thin k", True, [Reasoning("a < b </thin k")]),
    ("<thi", False, [Text("<thi")]),
    ("", True, []),
    ('hm</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', True,
     [Reasoning("hm"), CallBegin("f"), Arguments("{}")]),
]


def reader(begun: bool) -> MessageReader:
    return MessageReader(ReasoningReader(THINK, begun), Hermes({"f": {}}, False))


@pytest.mark.parametrize(("text", "begun", "expected"), CASES)
def test_whole(text: str, begun: bool, expected: list[Part]) -> None:
    assert reader(begun).whole([text], False) == expected


@settings(deadline=None)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 100)))
def test_cuts_make_no_difference(case: tuple[str, bool, list[Part]], places: list[int]) -> None:
    text, begun, expected = case
    bounds = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    assert reader(begun).whole([text[a:b] for a, b in itertools.pairwise(bounds)], False) == expected


def test_thoughts_leave_as_they_come() -> None:
    made = ReasoningReader(THINK, begun=True)
    assert made.push("one two</th") == [Reasoning("one two")]
    assert made.push("ree</think>four") == [Reasoning("</three"), Text("four")]


def test_prompts_that_open_the_tag() -> None:
    assert is_begun(THINK, "<|assistant|>\n<think>\n")
    assert not is_begun(THINK, "<|assistant|>\n<think>\n\n</think>\n\n")
    assert is_begun(TAGS["deepseek_r1"], "<|assistant|>")
    assert not is_begun(TAGS["deepseek_r1"], "<think>\n\n</think>\n\n")


def test_the_template_says_which_tags() -> None:
    assert choose("auto", lambda text: text == "</think>") is THINK
    assert choose("auto", lambda text: False) is None
    assert choose("none", lambda text: True) is None
    assert choose("deepseek_r1", lambda text: False) is TAGS["deepseek_r1"]


def test_calls_after_the_first_are_dropped_where_one_is_allowed() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    made = MessageReader(None, Hermes({"f": {}}, False), parallel=False).whole([call, call, " x"], False)
    assert made == [CallBegin("f"), Arguments("{}"), Text("x")]
