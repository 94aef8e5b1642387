"""Grammars of calls: what `required`, a named function and `strict` hold the model to, in its own format.

In llguidance's variant of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headrace._common.errors import InvalidRequest
from headrace._common.grammars import Grammar, GrammarError, read
from headrace_router.api.tool_arguments import PLAIN_KEYS, SPACING, keywords, tagged
from headrace_router.api.tool_types import FunctionTool
from headrace_router.api.tools import ToolUse
from headrace_router.text.tools.formats import FORMATS

_BODY_SPACING = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}


@dataclass(frozen=True)
class _Style:
    """Texts around one call, before its name, and between it and its arguments; around and between several.

    Attributes:
        arguments: the rules of a function's arguments, where they are not one JSON object.
    """

    before: str
    between: str
    after: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    quoted: bool = True  # the name
    arguments: Callable[[FunctionTool, str], list[str]] | None = None

    def calls(self, several: bool) -> str:
        """One call, or any number of them."""
        more = f"({_literal(self.separator)} call)*" if several else ""
        return " ".join(filter(None, (_literals(self.begin), "call", more, _literals(self.end))))


_STYLES = {
    "hermes": _Style('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", separator="\n"),
    "llama3_json": _Style('{"name": ', ', "parameters": ', "}", separator="; "),
    "mistral": _Style('{"name": ', ', "arguments": ', "}", "[", ", ", "]"),
    "pythonic": _Style("", "(", ")", "[", ", ", "]", quoted=False, arguments=keywords),
    "qwen3_coder": _Style(
        "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", separator="\n", quoted=False, arguments=tagged
    ),
}
_TOOL_CALL, _MARKER = "<tool_call>", "[TOOL_CALLS]"


def forced_calls(name: str, use: ToolUse, marked: bool) -> Grammar:
    """An output that calls a function of these; several only if the caller says that they may be. `name`: of the format;
    `marked`: the prompt ends with its marker.

    Raises:
        InvalidRequest: the schemas are too large.
    """
    style = _STYLES[FORMATS[name].forced or name]
    marker = _literals(_MARKER if name == "mistral" and not marked else "")
    return _lark([f"start: {marker} {style.calls(bool(use.parallel))}"], style, use.functions)


def free_calls(name: str, use: ToolUse, marker: int | None = None) -> Grammar:
    """Any output whose calls are as the schemas say. `marker`: the special token before Mistral's calls; None: it is text.

    Raises:
        InvalidRequest: the schemas are too large, or this format cannot hold the model to them.
    """
    style, several = _STYLES[name], use.parallel is not False
    if name in ("llama3_json", "pythonic"):  # a call is the whole output, or a block of it that is not offered here
        first, tag = ("{", "<|python_tag|>") if name == "llama3_json" else ("[", "<|python_start|>")
        other = f"OTHER: /([^{re.escape(first)}\\s](.|\\n)*)?/ & ~{_containing(tag)}"
        return _lark([f"start: {style.calls(several)} | other", "other: OTHER", other], style, use.functions)
    if name == "mistral" and marker is not None:  # which is no text
        lines = [f"start: rest (<[{marker}]> {style.calls(several)})?", "rest: /(.|\\n)*/"]
        return _lark(lines, style, use.functions)
    tag = _MARKER if name == "mistral" else _TOOL_CALL
    style = replace(style, before=style.before.removeprefix(tag))  # it belongs to what stands before
    block, times = (style.calls(several), "?") if name == "mistral" else ("call", "*")
    lines = [
        f"start: (free {block}){times} rest", f"free[suffix={_literal(tag)}]: /(.|\\n)*/", "rest: REST",
        f"REST: /(.|\\n)*/ & ~{_containing(tag)}",
    ]
    return _lark(lines, style, use.functions)


def calls_or_body(name: str, use: ToolUse, body: Grammar, marker: int | None = None) -> Grammar:
    """An output that either calls functions or is as `body` has it. `marker`: as above.

    Raises:
        InvalidRequest: the format cannot tell the two apart, this kind of grammar is not offered so, or the schemas are too
            large.
    """
    if body.kind not in ("json_schema", "json_object"):
        raise InvalidRequest("`tools` beside this kind of grammar are not supported", "tools")
    if name == "llama3_json":
        raise InvalidRequest(
            "`response_format` beside `tools` is not supported with this model: its calls are JSON as well. Set `tool_choice`",
            "response_format",
        )
    try:
        schema = json.loads(body.source or '{"type": "object"}')
    except (ValueError, RecursionError):
        schema = None
    assert isinstance(schema, dict)  # it was compiled before
    style = _STYLES[name]
    begin = "" if name != "mistral" else _literal(_MARKER) if marker is None else f"<[{marker}]>"
    start = f"start: {begin} {style.calls(use.parallel is not False)} | body"
    return _lark([start, f"body: %json {_dumps({'x-guidance': _BODY_SPACING, **schema})}"], style, use.functions)


def _lark(lines: list[str], style: _Style, functions: tuple[FunctionTool, ...]) -> Grammar:
    lines.append("call: " + " | ".join(f"call_{place}" for place in range(len(functions))))
    for place, function in enumerate(functions):
        name = json.dumps(function.name, ensure_ascii=False) if style.quoted else function.name
        rule = f"arguments_{place}"
        lines.append(f"call_{place}: {_literal(style.before + name + style.between)} {rule} {_literal(style.after)}")
        if style.arguments is not None:
            lines += style.arguments(function, rule)
        else:
            lines.append(f"{rule}: %json {_dumps(_arguments(function))}")
    try:
        return read("lark", "\n".join(lines))
    except GrammarError as error:
        raise InvalidRequest(f"`tools` cannot be enforced: {error}", "tools") from None


def _arguments(function: FunctionTool) -> dict[str, Any]:
    """The schema of a function's arguments; a plain one allows no properties but its own."""
    schema: dict[str, Any] = {"type": "object", **function.schema, "x-guidance": SPACING}
    if function.schema.keys() <= PLAIN_KEYS:
        schema["additionalProperties"] = False
    return schema


def _containing(text: str) -> str:
    """A pattern of all texts that hold this one."""
    return f"/(.|\\n)*{re.escape(text).replace('/', chr(92) + '/')}(.|\\n)*/"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literals(text: str) -> str:
    return _literal(text) if text else ""


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("`tools` cannot be enforced: a schema is nested too deeply", "tools") from None
