"""Grammars of calls: which outputs they let through, and that the parser of the same format reads those."""

from __future__ import annotations

import llguidance
import pytest

from headrace._common.errors import InvalidRequest
from headrace._common.grammars import Grammar, compile_grammar
from headrace_router.api.tool_grammars import calls_or_body, forced_calls, free_calls
from headrace_router.api.tool_types import FunctionTool
from headrace_router.api.tools import ToolUse
from headrace_router.text.parts import Arguments, CallBegin
from headrace_router.text.tools.formats import FORMATS

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
    llama = free_calls("llama3_json", USE)
    assert allows(llama, "just text {")
    assert allows(llama, L)
    assert allows(llama, "")
    assert not allows(llama, L.replace("5", "true"))
    with pytest.raises(InvalidRequest, match="strict"):
        free_calls("pythonic", USE)


def test_calls_or_a_body() -> None:
    grammar = calls_or_body("hermes", USE, Grammar("json_schema", '{"type": "array", "items": {"type": "null"}}'))
    assert allows(grammar, "[null, null]")
    assert allows(grammar, f"{H}\n{G}")
    assert not allows(grammar, "text")
    assert not allows(grammar, "[1]")
    assert allows(calls_or_body("hermes", USE, Grammar("json_object", "")), '{"b": 1}')
    json_object, regex = Grammar("json_object", ""), Grammar("regex", "a")
    for name, body in (("llama3_json", json_object), ("mistral", json_object), ("hermes", regex)):
        with pytest.raises(InvalidRequest, match="beside"):
            calls_or_body(name, USE, body)
