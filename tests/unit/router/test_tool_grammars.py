"""Grammars of calls: which outputs they let through, and that the parser of the same format reads those."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from headrace._common.errors import InvalidRequest
from headrace._common.grammars import Grammar, compile_grammar
from headrace_router.api.tool_grammars import calls_or_body, forced_calls, free_calls
from headrace_router.api.tool_types import FunctionTool
from headrace_router.api.tools import ToolUse
from headrace_router.text.parts import Arguments, CallBegin
from headrace_router.text.tools.formats import FORMATS
from tests.fakes.text_models import make_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"], "$defs": {"A": {"type": "integer"}}}
USE = ToolUse((FunctionTool("f", parameters=SCHEMA), FunctionTool('g"é')), True, None, False)
SEVERAL = ToolUse(USE.functions, True, True, False)


def allows(grammar: Grammar, text: str) -> bool:
    """Is the text a whole output?"""
    data = text.encode()
    matcher = compile_grammar(grammar, llguidance.LLTokenizer("byte"))
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


H = '<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>'
G = '<tool_call>\n{"name": "g\\"é", "arguments": {}}\n</tool_call>'
L = '{"name": "f", "parameters": {"a": 5}}'
M = '[{"name": "f", "arguments": {"a": 5}}]'
M2 = '[{"name": "f", "arguments": {"a": 5}}, {"name": "f", "arguments": {"a": 6}}]'


@pytest.mark.parametrize(("name", "good", "bad"), [
    ("hermes", [H, G], ["", "x" + H, f"{H}\n{H}", H.replace("5", '"5"'), H.replace("5", '5, "b": 1'), H.replace("f", "h")]),
    ("llama3_json", [L], [f"{L}; {L}"]), ("qwen3_coder", [H], []),
    ("pythonic", [L], []), ("mistral", [M], [f"[TOOL_CALLS]{M}", M2]),
])
def test_forced(name: str, good: list[str], bad: list[str]) -> None:
    grammar = forced_calls(name, USE, marked=True)
    assert [allows(grammar, text) for text in good] == [True] * len(good)
    assert [allows(grammar, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(("name", "text"), [("hermes", f"{H}\n{G}"), ("llama3_json", f"{L}; {L}"), ("mistral", M2)])
def test_several(name: str, text: str) -> None:
    assert allows(forced_calls(name, SEVERAL, marked=True), text)
    marker = "[TOOL_CALLS]" if name == "mistral" else ""
    assert allows(forced_calls(name, SEVERAL, marked=False), marker + text)
    machine = FORMATS[name].machine({"f": {}, 'g"é': {}}, False)
    parts = machine.push("[TOOL_CALLS]" * (name == "mistral") + text) + machine.finish(False)
    assert [type(part) for part in parts] == [CallBegin, Arguments] * 2


def test_free() -> None:
    grammar = free_calls("hermes", USE)
    for text in ("", "just text < 5", H, f"I look.\n{H}\n{G}\nDone."):
        assert allows(grammar, text), text
    for text in (H.replace("5", "true"), "x <tool_call>", H + H.replace("5", "true")):
        assert not allows(grammar, text), text


P = "[f(a=5)]"
Q = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("name", "good", "bad"), [
    ("llama3_json", ["", "just text {", L, f"{L}; {L}"], [L.replace("5", "true"), f"x <|python_tag|>{L}"]),
    ("pythonic", ["", "just text [f(", P, '[f(a=5), g"é()]'],
     [P.replace("5", "true"), "[f()]", "[1]", f"x <|python_start|>{P}", "[f(a=5, b=1)]"]),
    ("mistral", ["", "just text [", f"[TOOL_CALLS]{M}", f"I look.[TOOL_CALLS]{M2}"],
     [f"[TOOL_CALLS]{M}".replace("5", "true"), "[TOOL_CALLS]", f"[TOOL_CALLS]{M}[TOOL_CALLS]{M}".replace("5", "true")]),
    ("qwen3_coder", ["", "just text <tool", Q, f"I look.\n{Q}\n{Q}\nDone."], [Q.replace("5", "x"), H, "<tool_call>"]),
])
def test_free_in_other_formats(name: str, good: list[str], bad: list[str]) -> None:
    grammar = free_calls(name, USE)
    assert {text: allows(grammar, text) for text in good} == dict.fromkeys(good, True)
    assert {text: allows(grammar, text) for text in bad} == dict.fromkeys(bad, False)


MANY = FunctionTool("h", parameters={
    "type": "object", "required": ["c"], "additionalProperties": False, "properties": {
        "a": {"type": "string"}, "b": {"type": ["string", "null"]}, "c": {"$ref": "#/$defs/C"}, "d": {"type": "boolean"},
        "e": {"enum": ["x", "y z"]}, "f": {"type": "array", "items": {"type": "object"}},
    }, "$defs": {"C": {"type": "number"}},
})
VALUES: list[dict[str, Any]] = [
    {"c": 1}, {"a": 'é "q"\n </p>', "c": -2.5}, {"b": None, "c": 1e30, "f": [{"k": [True, None]}]},
    {"a": "", "b": "null", "c": 0, "d": True, "e": "y z", "f": []}, {"c": 1, "e": "x"},
]


def written(name: str, given: dict[str, Any]) -> str:
    if name == "pythonic":
        return f"[h({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in given.items())})]"
    texts = {k: v if isinstance(v, str) and k in ("a", "e") else json.dumps(v, ensure_ascii=False) for k, v in given.items()}
    inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function=h>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder"])
def test_arguments_one_by_one(name: str) -> None:
    grammar = free_calls(name, ToolUse((MANY,), False, None, False))
    for given in VALUES:
        text = written(name, given)
        assert allows(grammar, text), text
        call, arguments = FORMATS[name].machine({"h": MANY.schema}, True).push(text)
        assert call == CallBegin("h")
        assert isinstance(arguments, Arguments)
        assert json.loads(arguments.text) == given
    for wrong in ({}, {"a": "x"}, {"c": "1"}, {"c": 1, "d": 1}, {"c": 1, "e": "z"}, {"d": True, "c": 1}, {"c": 1, "z": 1}):
        assert not allows(grammar, written(name, wrong)), wrong


@pytest.mark.parametrize(("name", "schema", "words"), [
    ("pythonic", {"properties": {"a-b": {}}}, "'a-b' is no name"), ("pythonic", {"properties": {"for": {}}}, "'for'"),
    ("pythonic", {"properties": {}, "minProperties": 1}, "minProperties"), ("pythonic", {"anyOf": [{}]}, "anyOf"),
    ("qwen3_coder", {"properties": {"a>b": {}}}, "'a>b'"), ("qwen3_coder", {"properties": {}, "required": ["a"]}, "'a'"),
    ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern of 'a'"),
])
def test_what_a_format_cannot_enforce(name: str, schema: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        free_calls(name, ToolUse((FunctionTool("f", parameters=schema),), False, None, False))


def test_a_marker_that_is_a_token() -> None:
    made = make_tokenizer()
    made.add_special_tokens(["[TOOL_CALLS]"])
    marker = made.get_vocab_size() - 1
    tokenizer = llguidance.LLTokenizer(made.to_str())
    body = Grammar("json_object", "")
    for grammar, before in ((free_calls("mistral", USE, marker), "x"), (calls_or_body("mistral", USE, body, marker), "")):
        for call, right in ((M, True), (M.replace("5", "true"), False)):
            ids = [*tokenizer.tokenize_str(before), marker, *tokenizer.tokenize_str(call)]
            matcher = compile_grammar(grammar, tokenizer)
            assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == right


@pytest.mark.parametrize(("name", "call"), [
    ("hermes", f"{H}\n{G}"), ("mistral", f"[TOOL_CALLS]{M2}"), ("pythonic", P), ("qwen3_coder", f"{Q}\n{Q}"),
])
def test_calls_or_a_body(name: str, call: str) -> None:
    grammar = calls_or_body(name, USE, Grammar("json_schema", '{"type": "array", "items": {"type": "null"}}'))
    assert allows(grammar, "[null, null]")
    assert allows(grammar, call)
    assert not allows(grammar, "text")
    assert not allows(grammar, "[1]")
    assert allows(calls_or_body(name, USE, Grammar("json_object", "")), '{"b": 1}')
    with pytest.raises(InvalidRequest, match="beside"):
        calls_or_body(name, USE, Grammar("regex", "a"))
    with pytest.raises(InvalidRequest, match="calls are JSON"):
        calls_or_body("llama3_json", USE, Grammar("json_object", ""))
