"""Grammars that constrain an output: their kinds, what llguidance is told of each, and why one is refused.

Router and shard read a grammar with the same code, the router over single bytes, the shard over the model's tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from headrace._common.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "ebnf"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_SOURCE = 128 * 1024  # characters
MAX_REASON = 300  # characters of a refusal
# What llguidance says, where it names neither the keyword nor the reason: (a piece of it, what is said instead or before it).
REWORDED = (
    ("oneOf constraints", "oneOf: only alternatives that exclude each other by type or by a constant property are supported"),
    ("float range", "minimum, maximum: "), ("multiple of", "multipleOf: "), ("not present in a registry", "$ref: "),
    ("Pointer '", "$ref: "), ("NoExtension", "no output can fulfil it"), ("panic:", "it is too large"),
    ("fuel exhausted", "it is too complex: "), ("many items", "it is too complex: "), ("items; max", "it is too complex: "),
    ("too many expressions", "it is too complex: "),
)
# Weak models write blanks for as long as they may: enough for a line break and an indent, not for a page.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must be.

    Attributes:
        source: json_schema: the schema, as JSON; json_object: empty; regex: the whole output matches it (syntax of Rust's
            regex crate, without look-around and back-references); choice: a JSON list of strings; lark: llguidance's
            variant of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md); ebnf: llama.cpp's GBNF.
    """

    kind: Kind
    source: str


class GrammarError(InvalidRequest):
    """A grammar that cannot be used; the message says why, in the words of its keyword or place."""


def read(kind: str, source: str) -> Grammar:
    """A grammar of a kind that there is, no longer than the limit.

    Raises:
        GrammarError: names the kinds, or the limit.
    """
    if kind not in KINDS:
        raise GrammarError(f"the type {kind!r} is none of {', '.join(KINDS)}", "grammar")
    if len(source) > MAX_SOURCE:
        raise GrammarError(f"it has {len(source)} characters, the limit is {MAX_SOURCE}", "grammar")
    return Grammar(kind, source)


def limits() -> llguidance.LLParserLimits:
    """What compiling a grammar and one step of it may cost."""
    return llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def compile_grammar(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """A matcher at the beginning of the grammar. Releases the GIL for all that takes long.

    Raises:
        GrammarError: the grammar is wrong, asks for what cannot be enforced, or is too large.
    """
    try:
        matcher = llguidance.LLMatcher(tokenizer, definition(grammar), log_level=0, limits=limits())
    except ValueError as error:
        raise GrammarError(f"a schema is a JSON object: {one_line(str(error))}", "grammar") from None
    if matcher.is_error():
        raise refusal(grammar, matcher.get_error())
    return matcher


def definition(grammar: Grammar) -> str:
    """The grammar as llguidance takes it.

    Raises:
        GrammarError: seen before it is compiled.
        ValueError: llguidance's own, of a schema that is no JSON object.
    """
    make, source = llguidance.LLMatcher, grammar.source
    if grammar.kind == "json_object":
        return make.grammar_from_json_schema('{"type":"object"}', defaults=JSON_OPTIONS)
    if grammar.kind == "json_schema":
        return make.grammar_from_json_schema(source, defaults=JSON_OPTIONS)
    if not source:
        raise GrammarError("it is empty", "grammar")
    if grammar.kind == "regex":
        check_regex(source)
        return make.grammar_from_regex(source)
    if grammar.kind == "choice":
        return make.grammar_from_regex(choice_regex(source))
    if grammar.kind == "ebnf":
        try:
            source = any_to_lark(source)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise GrammarError(f"not EBNF: {one_line(str(error))}", "grammar") from None
    return make.grammar_from_lark(source)


def choice_regex(source: str) -> str:
    """A regex of exactly these strings.

    Raises:
        GrammarError: the source is no JSON list of strings, or an empty one.
    """
    try:
        options = json.loads(source)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        raise GrammarError("a choice is a list of at least one string", "grammar")
    return "|".join("".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in option) for option in options)


def check_regex(pattern: str) -> None:
    """
    Raises:
        GrammarError: a quantifier follows a quantifier. Rust's regex crate repeats the repetition, others refuse it or
            mean a possessive one: nobody means the same.
    """
    at, in_class, repeated = 0, 0, False
    while at < len(pattern):
        char, width = pattern[at], 1
        if char == "\\":
            width, repeated = 2, False
        elif char == "[":
            in_class, repeated = in_class + 1, False
            width += pattern.startswith("^", at + 1)
            width += pattern.startswith("]", at + width)  # a bracket that comes first is one of the class
        elif in_class:
            in_class -= char == "]"
        elif char in "*+?" or (char == "{" and pattern[at + 1 : at + 2].isdigit()):
            if repeated:
                raise GrammarError(f"at {at + 1}: a quantifier follows a quantifier", "grammar")
            repeated = pattern[at - 1 : at] != "("  # else the question mark of a group
            if char == "{":
                width = max(pattern.find("}", at) - at, 0) + 1
            if repeated and pattern[at + width : at + width + 1] == "?":
                width += 1  # lazy
        else:
            repeated = False
        at += width


def refusal(grammar: Grammar, error: str) -> GrammarError:
    """llguidance's error as one of ours, in one line."""
    reason = one_line(error)
    if said := next((text for piece, text in REWORDED if piece in reason), ""):
        reason = said + reason if said.endswith(": ") else said
    elif grammar.kind == "json_schema" and "regex" in reason:
        named = [key for key in ("pattern", "patternProperties") if f'"{key}"' in grammar.source]
        reason = f"{' or '.join(named)}: {reason}" if named else reason
    return GrammarError(reason, "grammar")


def one_line(error: str) -> str:
    """The part of an error of several lines that says what is wrong."""
    text = error.split("\n<")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it is not valid"]
    said = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    reason = f"regex: {said}" if said else lines[0]
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}…"
