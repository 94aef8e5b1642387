"""How APIs write grammars: TGI's `grammar`, OpenAI's `response_format`, and vLLM's `guided_*` and `structured_outputs`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from headrace._common.errors import InvalidRequest
from headrace._common.grammars import Grammar, GrammarError, read
from headrace_router.service import Service

GUIDED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}


class GrammarFields(Struct, kw_only=True):
    """Fields of OpenAI's bodies that ask for a grammar."""

    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None


async def native_grammar(service: Service, given: Any) -> Grammar | None:
    """TGI's `grammar`, `{"type": "json" | "json_object" | "json_schema" | "regex", "value": …}`, checked.

    Raises:
        InvalidRequest: it is of another shape, cannot be compiled, or the model cannot be constrained.
    """
    if given is None:
        return None
    return await checked(service, _tagged(given, "grammar"), "grammar")


async def openai_grammar(service: Service, body: GrammarFields) -> Grammar | None:
    """What the fields of a body ask for, checked.

    Raises:
        InvalidRequest: as above, or two of them ask for something.
    """
    found = [(field, grammar) for field, grammar in _fields(body) if grammar is not None]
    if not found:
        return None
    field, grammar = found[0]
    if len(found) > 1:
        raise InvalidRequest(f"`{field}` and `{found[1][0]}` exclude each other", found[1][0])
    return await checked(service, grammar, field)


def _fields(body: GrammarFields) -> list[tuple[str, Grammar | None]]:
    """Each field with the grammar that it asks for, if it does."""
    made: list[tuple[str, Grammar | None]] = []
    if body.response_format is not None and body.response_format.get("type") != "text":
        made.append(("response_format", _tagged(body.response_format, "response_format")))
    for name, field in GUIDED.items():
        made.append((field, _plain(name, getattr(body, field), field)))
    for name, value in (body.structured_outputs or {}).items():
        field = f"structured_outputs.{name}"
        if name == "json_object":
            made.append((field, Grammar("json_object", "") if value else None))
        elif name in GUIDED:
            made.append((field, _plain(name, value, field)))
        elif value:
            raise InvalidRequest(f"`{field}` is not supported", "structured_outputs")
    return made


def _tagged(given: Any, field: str) -> Grammar:
    """A grammar in TGI's or OpenAI's form: a type, and beside it its value."""
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise InvalidRequest(f"`{field}` must be an object with a `type`", field)
    kind = given["type"]
    if kind in ("json", "json_object"):
        schema = given.get("value", given.get("schema"))
        if schema is None and kind == "json_object":
            return Grammar("json_object", "")
        return _schema(schema, field)
    if kind == "json_schema":
        inner = given.get("json_schema", given.get("value"))
        if not isinstance(inner, dict):
            raise InvalidRequest(f"`{field}.json_schema` must be an object with a `schema`", field)
        return _schema(inner.get("schema"), field)
    if kind == "regex":
        return _text("regex", given.get("value", given.get("pattern")), field)
    raise InvalidRequest(f"`{field}.type` {kind!r} is not supported: json_object, json_schema or regex", field)


def _plain(name: str, value: Any, field: str) -> Grammar | None:
    """A grammar in vLLM's form: the name of a kind, and its value."""
    if value is None:
        return None
    if name == "json":
        return _schema(value, field)
    if name == "choice":
        return _read("choice", msgspec.json.encode(value).decode(), field)
    if name == "grammar":
        return _text("ebnf" if isinstance(value, str) and "::=" in value else "lark", value, field)
    return _text(name, value, field)


def _schema(value: Any, field: str) -> Grammar:
    """A schema: an object, or a string with one in JSON."""
    if isinstance(value, dict):
        try:
            value = msgspec.json.encode(value).decode()
        except RecursionError:
            raise InvalidRequest(f"`{field}` is not valid: the schema is nested too deeply", field) from None
    return _text("json_schema", value, field)


def _text(kind: str, value: Any, field: str) -> Grammar:
    if not isinstance(value, str):
        wanted = "a schema, as an object or as JSON in a string" if kind == "json_schema" else "a string"
        raise InvalidRequest(f"`{field}` must hold {wanted}", field)
    return _read(kind, value, field)


def _read(kind: str, source: str, field: str) -> Grammar:
    try:
        return read(kind, source)
    except GrammarError as error:
        raise InvalidRequest(f"`{field}` is not valid: {error}", field) from None


async def checked(service: Service, grammar: Grammar, field: str) -> Grammar:
    """
    Raises:
        InvalidRequest: the grammar cannot be compiled, this model not be constrained, or the operator wants no grammars; names
            the field.
    """
    if service.settings.disable_grammar_support:
        raise InvalidRequest(f"`{field}` is not supported: the server was started with --disable-grammar-support", field)
    if "grammar" not in service.shard.info.features:
        raise InvalidRequest(f"`{field}` is not supported: this model's tokens cannot be constrained", field)
    try:
        await service.grammars.check(grammar)
    except GrammarError as error:
        raise InvalidRequest(f"`{field}` is not valid: {error}", field) from None
    return grammar
