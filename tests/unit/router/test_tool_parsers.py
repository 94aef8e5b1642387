"""Tool calls in the formats of models: what is a call, what stays text, and that cuts make no difference."""

from __future__ import annotations

import itertools
import json
from keyword import iskeyword
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace._common.detokenizer import Detokenizer, TokenBytes
from headrace_router.text.parts import Arguments, CallBegin, Part, Text, merged
from headrace_router.text.tools.formats import FORMATS, choose
from headrace_router.text.tools.json_calls import Mistral
from headrace_router.text.tools.machine import Machine

NAMES: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}, "get_weather": {}, "g": {},
}


def parse(machine: Machine, pieces: list[str], cut: bool = False) -> list[Part]:
    return merged([part for piece in pieces for part in machine.push(piece)] + machine.finish(cut))


def read(name: str, text: str, whole: bool = False, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """(all text, [(name, arguments)])"""
    parts = parse(FORMATS[name].machine(NAMES, whole), [text], cut)
    said, calls = "", []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append((part.name, ""))
        elif isinstance(part, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
        else:
            said += part.text
    return said, calls


F1 = ("f", '{"a": 1}')
WELL_FORMED: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "hello\n", "hello\n", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F1]),
    ("hermes", 'I look.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name":"g"}</tool_call>\n',
     "I look.", [F1, ("g", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> done', "done", [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [F1]),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "x": [true, -1.5e3], "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\""}}</tool_call>', "",
     [("f", '{"a": "</tool_call>\\""}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', "", [("f", '{"a": "1\\n2"}')]),
    ("hermes", '<<tool_<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "<<tool_", [F1]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [F1]),
    ("llama3_json", ' {"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "",
     [F1, ("g", "{}")]),
    ("llama3_json", 'x <|python_tag|>{"name": "f", "parameters": {"a": 1}}', "x", [F1]),
    ("llama3_json", "plain", "plain", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", [F1, ("g", "{}")]),
    ("mistral", 'x[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}] y', "xy", [F1]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123[ARGS]{}', "", [F1, ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [F1]),
    ("pythonic", "[f(a=1), g()]", "", [F1, ("g", "{}")]),
    ("pythonic", "x<|python_start|>[get_weather(city='B)\\'', b=[1, {'c': true}])]<|python_end|>", "x",
     [("get_weather", '{"city": "B)\'", "b": [1, {"c": true}]}')]),
    ("pythonic", "[f(ａ=1, s=\"\\ud83d\\ude00\", 名前='é')]", "", [("f", '{"ａ": 1, "s": "😀", "名前": "é"}')]),
    ("qwen3_coder", "I look.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
     "I look.", [F1]),
    ("qwen3_coder",
     "<tool_call><function=f><parameter=s>\n1\n<b>\n</parameter><parameter=a>x</parameter></function></tool_call>", "",
     [("f", '{"s": "1\\n<b>", "a": "x"}')]),
    ("qwen3_coder", "<tool_call><function=g></function></tool_call>\nx", "x", [("g", "{}")]),
]
MALFORMED = [
    ("hermes", "<tool_call>never mind</tool_call>"), ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5}</tool_call>'), ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>'),
    ("hermes", "a < b <tool"), ("hermes", '<tool_call>{"arguments": {}}</tool_call>'), ("hermes", "<tool_call>"),
    ("llama3_json", '{"name": "John", "age": 5}'), ("llama3_json", "{not json}"), ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", '{"name": "f'), ("mistral", "[TOOL_CALLS]"), ("mistral", "[TOOL_CALLS]what is this{}"),
    ("mistral", '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]'), ("pythonic", "[1, 2]"), ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=b)]"), ("pythonic", "[f(a=1"), ("pythonic", "[]"), ("pythonic", "[f(a=(]"), ("pythonic", "[f(**x)]"),
    ("pythonic", "[f(a='\\ud83d')]"),
    ("qwen3_coder", "<tool_call><function=unknown></function></tool_call>"), ("qwen3_coder", "<tool_call>{}</tool_call>"),
    ("qwen3_coder", "<tool_call><function=f"),
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("name", "text", "said", "calls"), WELL_FORMED)
def test_calls(name: str, text: str, said: str, calls: list[tuple[str, str]], whole: bool) -> None:
    assert read(name, text, whole) == (said, calls)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_is_no_call_stays_text(name: str, text: str, whole: bool) -> None:
    assert read(name, text, whole) == (text, [])


BROKEN = '<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call>'


def test_a_call_that_breaks_off() -> None:
    assert read("hermes", BROKEN, whole=True) == (BROKEN, [])
    assert read("hermes", BROKEN, whole=False) == ("oops}}</tool_call>", [("f", '{"a": 1, ')])


@pytest.mark.parametrize("whole", [False, True])
def test_a_call_that_is_cut(whole: bool) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "Bo'
    assert read("hermes", text, whole, cut=True) == ("", [("f", '{"a": "Bo')])


def test_arguments_come_as_they_are_written() -> None:
    machine = FORMATS["hermes"].machine(NAMES, False)
    assert machine.push('<tool_call>{"name": "f", "argum') == []
    assert machine.push('ents": {"a": "B') == [CallBegin("f"), Arguments('{"a": "B')]
    assert machine.push('onn"}') == [Arguments('onn"}')]


def test_a_marker_that_the_prompt_ends_with() -> None:
    assert parse(Mistral(NAMES, False, inside=True), ['[{"name": "f", "arguments": {"a": 1}}]']) == [
        CallBegin("f"), Arguments('{"a": 1}')
    ]


def test_text_is_held_back_no_longer_than_it_may_be_a_marker() -> None:
    machine = FORMATS["hermes"].machine(NAMES, False)
    assert machine.push("a <tool_c") == [Text("a")]
    assert machine.push("x") == [Text(" <tool_cx")]


def cuts(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


TEXTS = [(n, t) for n, t, _, _ in WELL_FORMED] + MALFORMED + [("hermes", BROKEN)]
PIECES = ["<tool_call>", "</tool_call>", "{", "}", '"name"', '"f"', ": ", ", ", '"arguments"', "[TOOL_CALLS]", "[", "]", "f(",
          ")", "a=1", "<|python_tag|>", "\n", "x", '{"name": "f", "arguments": {}}', '"parameters"', "\\", "1",
          "<function=f>", "<parameter=a>", "</parameter>", "</function>"]


@settings(deadline=None)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 300)), st.booleans(), st.booleans())
def test_cuts_make_no_difference(case: tuple[str, str], places: list[int], whole: bool, cut: bool) -> None:
    name, text = case
    made = parse(FORMATS[name].machine(NAMES, whole), cuts(text, places), cut)
    assert made == parse(FORMATS[name].machine(NAMES, whole), [text], cut)


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(PIECES), max_size=12), st.booleans())
def test_any_text(name: str, pieces: list[str], whole: bool) -> None:
    text = "".join(pieces)
    made = parse(FORMATS[name].machine(NAMES, whole), pieces)
    assert made == parse(FORMATS[name].machine(NAMES, whole), list(text))
    if not any(isinstance(part, CallBegin) for part in made):
        assert "".join(part.text for part in made if isinstance(part, Text)) == text
    elif whole:
        for part in made:
            assert not isinstance(part, Arguments) or isinstance(json.loads(part.text), dict)


NAMED = st.sampled_from(["a", "größe", "名前", "e\u0301", "_x"])
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.text() | NAMED, JSON, max_size=3), st.booleans(), st.sampled_from([None, 2]),
    st.lists(st.integers(0, 300)),
)
def test_arguments_survive(arguments: dict[str, Any], ascii_only: bool, indent: int | None, places: list[int]) -> None:
    call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only, indent=indent)
    dumped = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    texts = [("hermes", f"<tool_call>{call}</tool_call>"), ("llama3_json", call), ("mistral", f"[TOOL_CALLS][{call}]"),
             ("mistral", f"[TOOL_CALLS]f[ARGS]{dumped}")]
    if all(key.isidentifier() and not iskeyword(key) for key in arguments):
        texts.append(("pythonic", f"[f({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"))
    if all(key == key.strip() and ">" not in key for key in arguments):
        inner = "".join(f"<parameter={key}>\n{json.dumps(value)}\n</parameter>" for key, value in arguments.items())
        texts.append(("qwen3_coder", f"<tool_call><function=f>{inner}</function></tool_call>"))
    for name, text in texts:
        for whole in (False, True):
            begin, *rest = parse(FORMATS[name].machine({"f": {}}, whole), cuts(text, places))
            assert begin == CallBegin("f")
            assert json.loads("".join(part.text for part in rest if isinstance(part, Arguments))) == arguments


LETTERS = "e\u0301 \U0001f469\u200d\U0001f467 你好"
SPOKEN = {
    "hermes": f'Ich höre… \U0001f9d0\n<tool_call>{{"name": "f", "arguments": {{"s": "{LETTERS}"}}}}</tool_call>',
    "llama3_json": f'{{"name": "f", "parameters": {{"s": "{LETTERS}"}}}}',
    "mistral": f'Ich höre… \U0001f9d0[TOOL_CALLS]f[ARGS]{{"s": "{LETTERS}"}}',
    "pythonic": f"[f(s='{LETTERS}')]",
    "qwen3_coder": f"Ich höre… \U0001f9d0<tool_call><function=f><parameter=s>\n{LETTERS}\n</parameter></function></tool_call>",
}


class Cuts(TokenBytes):
    """A vocabulary of these tokens."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._known, self.exact = dict(enumerate(tokens)), True


@settings(deadline=None)
@given(st.sampled_from(sorted(SPOKEN)), st.lists(st.integers(0, 300)), st.booleans())
def test_tokens_that_end_within_characters(name: str, places: list[int], whole: bool) -> None:
    data = SPOKEN[name].encode()
    bounds = [0, *sorted({p % (len(data) + 1) for p in places}), len(data)]
    tokens = [data[a:b] for a, b in itertools.pairwise(bounds)]
    detokenizer = Detokenizer(Cuts(tokens), frozenset())
    pieces = [detokenizer.push(token) for token in range(len(tokens))] + [detokenizer.flush()]
    made = parse(FORMATS[name].machine(NAMES, whole), pieces)
    assert made == parse(FORMATS[name].machine(NAMES, whole), [SPOKEN[name]])
    assert json.loads("".join(part.text for part in made if isinstance(part, Arguments))) == {"s": LETTERS}


@pytest.mark.parametrize(("template", "name"), [
    ("... <tool_call>\n{...}\n</tool_call>", "hermes"), ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"), ("[func_name1(params)]", "pythonic"), ("", "hermes"),
    ("<tool_call>\n<function=x>", "qwen3_coder"),
])
def test_the_template_says_which_format(template: str, name: str) -> None:
    assert choose("auto", lambda text: text in template).name == name
    assert choose("mistral", lambda text: text in template).name == "mistral"
