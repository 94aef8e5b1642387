"""What grammars are refused, and in what words."""

from __future__ import annotations

import json
import re

import llguidance
import pytest

from headrace._common.grammars import MAX_SOURCE, Grammar, GrammarError, compile_grammar, read

BYTES = llguidance.LLTokenizer("byte")


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = compile_grammar(grammar, BYTES)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "words"), [
    (Grammar("regex", "foo**"), "at 5: a quantifier follows a quantifier"), (Grammar("regex", "a{2}{3}"), "quantifier"),
    (Grammar("regex", "a?+"), "quantifier"), (Grammar("regex", "(a+)*?+"), "quantifier"), (Grammar("regex", ""), "it is empty"),
    (Grammar("regex", "[a"), "unclosed character class"), (Grammar("regex", "("), "unclosed group"),
    (Grammar("regex", "\\1(a)"), "backreferences"), (Grammar("regex", "(?=a)b"), "look-around"),
    (Grammar("regex", "a{2,1}"), "repetition count"), (Grammar("regex", "(?P<x"), "capture group name"),
    (Grammar("regex", "(" * 500 + ")" * 500), "nest"),
    (Grammar("json_schema", "not json"), "a schema is a JSON object"), (Grammar("json_schema", "5"), "is a JSON object"),
    (Grammar("json_schema", '{"type": "strange"}'), "strange"), (Grammar("json_schema", '{"not": {}}'), '"not"'),
    (Grammar("json_schema", '{"required": "a"}'), "'required'"),
    (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), '"uniqueItems"'),
    (Grammar("json_schema", '{"properties": {"a": {"pattern": "["}}}'), "pattern: regex: unclosed character class"),
    (Grammar("json_schema", '{"$ref": "http://example.com/x"}'), "$ref: "),
    (Grammar("json_schema", '{"$ref": "#/x"}'), "$ref: "),
    (Grammar("json_schema", '{"oneOf": [{}, {}]}'), "oneOf: "), (Grammar("json_schema", '{"multipleOf": 0}'), "multipleOf: "),
    (Grammar("json_schema", '{"type": "number", "minimum": 1e-9, "maximum": 1e30}'), "minimum, maximum: "),
    (Grammar("json_schema", '{"type": "integer", "multipleOf": 999999937}'), "too complex"),
    (Grammar("json_schema", "[" * 100_000), "a schema is a JSON object"),
    (Grammar("json_schema", '{"a":' * 1000 + "1" + "}" * 1000), "recursion"),
    (Grammar("choice", "[]"), "at least one string"), (Grammar("choice", '["a", 1]'), "at least one string"),
    (Grammar("lark", "start: foo"), "foo"), (Grammar("ebnf", "root ::= ("), "not EBNF"),
    (Grammar("ebnf", "root ::= x"), "'x' not found"),
    (Grammar("lark", "start: " + "(" * 9000 + '"a"' + ")" * 9000), "nested"),
])
def test_refusals_say_why_in_one_line(grammar: Grammar, words: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(words)) as caught:
        compile_grammar(grammar, BYTES)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_kinds_and_lengths() -> None:
    with pytest.raises(GrammarError, match="'bnf' is none of json_schema, json_object"):
        read("bnf", "x")
    with pytest.raises(GrammarError, match=f"the limit is {MAX_SOURCE}"):
        read("regex", "a" * (MAX_SOURCE + 1))
    assert read("regex", "a" * MAX_SOURCE) == Grammar("regex", "a" * MAX_SOURCE)


@pytest.mark.parametrize(("pattern", "text"), [
    ("^abc$", "abc"), ("a*?b+?", "aab"), ("(?:a|b){2}", "ab"), ("[*+?]+", "*+?"), ("[]*]*", "]*"), ("[^]*+]{2}", "ab"),
    (r"\*+", "**"), (r"a{2}?", "aa"), ("(?i)x?", "X"), (r"\(?\{*", "({{"), ("a|", ""), (r"\u2e7f", "\u2e7f"),
])
def test_patterns_that_only_look_odd(pattern: str, text: str) -> None:
    assert accepts(Grammar("regex", pattern), text)


def test_choices_are_taken_as_they_are() -> None:
    options = ["a.b", "(", "\\d", "", "line\nbreak", "é漢🙂", "^$"]
    grammar = Grammar("choice", json.dumps(options))
    assert all(accepts(grammar, option) for option in options)
    assert not any(accepts(grammar, wrong) for wrong in ("axb", "1", "linebreak", "a.b("))


def test_white_space_has_an_end() -> None:
    grammar = Grammar("json_schema", '{"properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": false}')
    assert accepts(grammar, '{\n       "a": "x" }')
    assert not accepts(grammar, '{\n        "a": "x" }')
    assert not accepts(grammar, ' {"a": "x"}')


def test_json_object_is_an_object() -> None:
    assert accepts(Grammar("json_object", ""), '{"a": [1, {"b": null}]}')
    assert not accepts(Grammar("json_object", ""), "[1]")
