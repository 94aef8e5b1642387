"""Grammar rules of arguments that are written one by one: as Python's keywords, or between tags.

They come in the order of the schema. Only what its top level says of each property can be enforced so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

from headrace._common.errors import InvalidRequest
from headrace_router.api.tool_types import FunctionTool
from headrace_router.text.tools.xml_calls import is_text

PLAIN_KEYS = frozenset(("type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"))
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NOTES = frozenset(("type", "title", "description", "default", "examples"))  # of a property; they constrain nothing more


def refusal(function: FunctionTool, why: str) -> InvalidRequest:
    """The arguments of this function cannot be enforced."""
    return InvalidRequest(f"`tools` cannot be enforced in this model's format of calls: {function.name}: {why}", "tools")


def keywords(function: FunctionTool, rule: str) -> list[str]:
    """`a=1, b="x"`, as rules of which `rule` is the first. Values are JSON.

    Raises:
        InvalidRequest: names what cannot be enforced.
    """
    found = _properties(function)
    for key in found:
        if not key.isidentifier() or iskeyword(key):
            raise refusal(function, f"{key!r} is no name in Python")
    required = _required(function)
    values = [f"{rule}_{place}: {_literal(f'{key}=')} %json {_json(function, schema)}"
              for place, (key, schema) in enumerate(found.items())]
    followed = [f'{rule}_after_{place}: (", " {rule}_{place}){"" if key in required else "?"} {rule}_after_{place + 1}'
                for place, key in enumerate(found) if place]
    begun = []
    for place, key in enumerate(found):
        begun.append(f"{rule}_{place} {rule}_after_{place + 1}")
        if key in required:
            break
    else:
        begun.append('""')
    return [f"{rule}: {' | '.join(begun)}", *values, *followed, f'{rule}_after_{len(found)}: ""']


def tagged(function: FunctionTool, rule: str) -> list[str]:
    """`<parameter=a>`, the value, `</parameter>`, as rules of which `rule` is the first. A string is written as it is.

    Raises:
        InvalidRequest: names what cannot be enforced.
    """
    made, items, required = [], [], _required(function)
    for place, (key, schema) in enumerate(_properties(function).items()):
        if ">" in key or key != key.strip():
            raise refusal(function, f"{key!r} cannot be written in a tag")
        begin = _literal(f"<parameter={key}>\n")
        made.append(f"{rule}_{place}: {begin} {rule}_{place}_value")
        made += _tagged_value(function, f"{rule}_{place}_value", key, schema)
        items.append(f"{rule}_{place}" if key in required else f"{rule}_{place}?")
    return [f"{rule}: {' '.join(items) or _literal('')}", *made]


def _tagged_value(function: FunctionTool, rule: str, key: str, schema: Any) -> list[str]:
    """A value and the tag behind it."""
    end = _literal("\n</parameter>\n")
    if not is_text(schema):
        return [f"{rule}: {rule}_json {end}", f"{rule}_json: %json {_json(function, schema)}"]
    for name in sorted(schema.keys() - _NOTES - {"enum", "const"}):
        raise refusal(function, f"{name} of {key!r}, which is a string")
    if choices := [schema["const"]] if "const" in schema else schema.get("enum"):
        return [f"{rule}: ({' | '.join(map(_literal, choices))}) {end}"]
    return [f'{rule}: {rule}_text "\\n"', f'{rule}_text[suffix="</parameter>"]: /(.|\\n)*/']


def _properties(function: FunctionTool) -> Mapping[str, Any]:
    """The schemas of the arguments by their names.

    Raises:
        InvalidRequest: the schema says more than which arguments there are.
    """
    schema = function.schema
    for key in schema.keys() - PLAIN_KEYS:
        if key != "additionalProperties" or schema[key] is not False:
            raise refusal(function, f"{key} beside its properties")
    found = schema.get("properties", {})
    if not isinstance(found, dict):
        raise refusal(function, "properties must be an object")
    for key in _required(function) - found.keys():
        raise refusal(function, f"required {key!r} is none of its properties")
    return found


def _required(function: FunctionTool) -> set[str]:
    given = function.schema.get("required", [])
    if not isinstance(given, list) or not all(isinstance(key, str) for key in given):
        raise refusal(function, "required must be a list of names")
    return set(given)


def _json(function: FunctionTool, schema: Any) -> str:
    """The schema of one value, with what it may refer to."""
    named = {key: function.schema[key] for key in ("$defs", "definitions") if key in function.schema}
    if not isinstance(schema, dict):
        if schema is not True:
            raise refusal(function, "a property's schema must be an object")
        schema = {}
    try:
        return json.dumps({**named, **schema, "x-guidance": SPACING}, ensure_ascii=False)
    except RecursionError:
        raise refusal(function, "a schema is nested too deeply") from None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
