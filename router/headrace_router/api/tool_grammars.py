"""Grammars of calls: what `required`, a named function and `strict` hold the model to, in its own format.

In llguidance's variant of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headrace._common.errors import InvalidRequest
from headrace._common.grammars import Grammar, GrammarError, read
from headrace_router.api.tool_types import FunctionTool
from headrace_router.api.tools import ToolUse
from headrace_router.text.tools.formats import FORMATS

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PLAIN_KEYS = frozenset(("type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"))
_BODY_SPACING = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}


@dataclass(frozen=True)
class _Style:
    """Texts around one call, before its name, and between it and its arguments; around and between several."""

    before: str
    between: str
    after: str
    begin: str = ""
    separator: str = ""
    end: str = ""


_STYLES = {
    "hermes": _Style('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", separator="\n"),
    "llama3_json": _Style('{"name": ', ', "parameters": ', "}", separator="; "),
    "mistral": _Style('{"name": ', ', "arguments": ', "}", "[", ", ", "]"),
}
_STYLES |= {made.name: _STYLES[made.forced] for made in FORMATS.values() if made.forced}
# what an output that calls nothing may be, and what stands before a call
_FREE = {
    "hermes": ('(free calls)* rest\nfree[suffix="<tool_call>"]: /(.|\\n)*/\n'
               "rest: REST\nREST: /(.|\\n)*/ & ~/(.|\\n)*<tool_call>(.|\\n)*/"),
    "llama3_json": "calls | /([^{\\s](.|\\n)*)?/",
}


def forced_calls(name: str, use: ToolUse, marked: bool) -> Grammar:
    """An output that calls a function of these; several only if the caller says that they may be. `name`: of the format;
    `marked`: the prompt ends with its marker.

    Raises:
        InvalidRequest: the schemas are too large.
    """
    style = _STYLES[name]
    marker = "[TOOL_CALLS]" if name == "mistral" and not marked else ""
    more = f"({_literal(style.separator)} call)*" if use.parallel else ""
    begin, end = _literals(marker + style.begin), _literals(style.end)
    return _lark(f"start: {begin} call {more} {end}", style, use.functions)


def free_calls(name: str, use: ToolUse) -> Grammar:
    """Any output whose calls are as the schemas say.

    Raises:
        InvalidRequest: this format is not offered so, or the schemas are too large.
    """
    if name not in _FREE:
        raise InvalidRequest(
            "`strict` is not supported with this model unless `tool_choice` is required or names a function", "tools"
        )
    style = _STYLES[name]
    if name == "hermes":  # the marker belongs to what stands before
        style = _Style(style.before.removeprefix("<tool_call>"), style.between, style.after)
    return _lark(f"start: {_FREE[name]}\ncalls: call", style, use.functions)


def calls_or_body(name: str, use: ToolUse, body: Grammar) -> Grammar:
    """An output that either calls functions or is as `body` has it. Only where a marker tells the two apart.

    Raises:
        InvalidRequest: this format or this kind of grammar is not offered so, or the schemas are too large.
    """
    if name != "hermes" or body.kind not in ("json_schema", "json_object"):
        raise InvalidRequest("`tools` beside this kind of grammar are not supported with this model", "tools")
    try:
        schema = json.loads(body.source or '{"type": "object"}')
    except (ValueError, RecursionError):
        schema = None
    assert isinstance(schema, dict)  # it was compiled before
    style = _STYLES[name]
    more = f"({_literal(style.separator)} call)*" if use.parallel is not False else ""
    text = f"start: call {more} | body\nbody: %json {_dumps({'x-guidance': _BODY_SPACING, **schema})}"
    return _lark(text, style, use.functions)


def _lark(start: str, style: _Style, functions: tuple[FunctionTool, ...]) -> Grammar:
    lines = [start, "call: " + " | ".join(f"call_{place}" for place in range(len(functions)))]
    for place, function in enumerate(functions):
        before = _literal(style.before + json.dumps(function.name, ensure_ascii=False) + style.between)
        lines.append(f"call_{place}: {before} arguments_{place} {_literal(style.after)}")
        lines.append(f"arguments_{place}: %json {_dumps(_arguments(function))}")
    try:
        return read("lark", "\n".join(lines))
    except GrammarError as error:
        raise InvalidRequest(f"`tools` cannot be enforced: {error}", "tools") from None


def _arguments(function: FunctionTool) -> dict[str, Any]:
    """The schema of a function's arguments; a plain one allows no properties but its own."""
    schema: dict[str, Any] = {"type": "object", **function.schema, "x-guidance": _SPACING}
    if function.schema.keys() <= _PLAIN_KEYS:
        schema["additionalProperties"] = False
    return schema


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literals(text: str) -> str:
    return _literal(text) if text else ""


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("`tools` cannot be enforced: a schema is nested too deeply", "tools") from None
