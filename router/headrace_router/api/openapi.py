"""The OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.0), made of the types that validate."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

import headrace
from headrace._common.errors import DeadlineExceeded, HeadraceError, NotFound, mapping
from headrace_router.api.caller import CLASS_HEADER, LONGEST_TIMEOUT, TIER_HEADER, TIMEOUT_HEADER
from headrace_router.api.errors import is_anthropic, is_openai
from headrace_router.api.lasting import IDS_HEADER
from headrace_router.api.request_ids import HEADER as ID_HEADER
from headrace_router.api.routes import Route
from headrace_router.network.jobs import TIERS
from headrace_router.tenants import CLASSES

REFERENCES = "#/components/schemas/{name}"
RATES = [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]


class NativeError(Struct):
    """What the native routes answer when something is wrong; also the last event of a stream that fails."""

    error: str
    error_type: str


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Struct):
    """What the routes under /v1 answer when something is wrong; also the last event of a stream that fails."""

    error: ErrorDetail


class AnthropicErrorDetail(Struct):
    type: str
    message: str


class AnthropicError(Struct, tag_field="type", tag="error"):
    """What the routes under /v1/messages answer when something is wrong; also the last event of a stream that fails."""

    error: AnthropicErrorDetail


def make_document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document of these routes."""
    schemas = _Schemas(routes)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(_path(route), {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace", "version": headrace.__version__, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Text generation: TGI's API, and OpenAI's and Anthropic's under /v1.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components, "parameters": _PARAMETERS, "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


_PARAMETERS: dict[str, Any] = {
    "request_id": {
        "name": ID_HEADER, "in": "header", "schema": {"type": "string"},
        "description": "named in the answer and in log lines; replaced if it holds other characters than ids do",
    },
    "timeout": {
        "name": TIMEOUT_HEADER, "in": "header",
        "schema": {"type": "integer", "minimum": 1, "maximum": LONGEST_TIMEOUT},
        "description": "milliseconds after which the answer is of no use: what has not ended by then ends with an error",
    },
    "class": {
        "name": CLASS_HEADER, "in": "header", "schema": {"type": "string", "enum": list(CLASSES)},
        "description": "workload class, of those that the key may use",
    },
    "event_ids": {
        "name": IDS_HEADER, "in": "header", "schema": {"type": "string", "enum": ["true", "false"]},
        "description": "of a gateway: whether the events of a stream have ids, by which it is picked up again",
    },
    "last_event_id": {
        "name": "Last-Event-ID", "in": "header", "schema": {"type": "string", "pattern": "^[0-9]{1,9}-[0-9]{1,9}$"},
        "description": "the event after which to go on, as 1-17",
    },
    "tier": {
        "name": TIER_HEADER, "in": "header", "schema": {"type": "string", "enum": list(TIERS), "default": "trusted"},
        "description": "of a gateway: the least trusted worker that may run the request, and read it",
    },
}
_HEADERS: dict[str, Any] = {
    "request_id": {"schema": {"type": "string"}, "description": f"the request's {ID_HEADER}, or a new one"},
    "retry_after": {"schema": {"type": "integer", "minimum": 1}, "description": "seconds until a retry may succeed"},
    **{name: {"schema": {"type": "string"}, "description": "of the key's limits, where it has them"} for name in RATES},
}


class _Schemas:
    """The components of all types, and references to them."""

    def __init__(self, routes: Sequence[Route]) -> None:
        types: list[Any] = [NativeError, OpenAIError, AnthropicError]
        types += [t for route in routes for kind in (route.body, route.reply, route.events) for t in _alternatives(kind)]
        unique = list({repr(t): t for t in types}.values())
        made, self.components = msgspec.json.schema_components(unique, ref_template=REFERENCES)
        self._by_type = dict(zip((repr(t) for t in unique), made, strict=True))

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type, or of one of several."""
        made = [self._by_type[repr(t)] for t in _alternatives(kind)]
        return made[0] if len(made) == 1 else {"anyOf": made}


def _alternatives(kind: Any) -> tuple[Any, ...]:
    if kind is None:
        return ()
    return kind if isinstance(kind, tuple) else (kind,)


def _path(route: Route) -> str:
    """The path as OpenAPI writes it: without the patterns of its variables."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    openai, path = is_openai(route.path), _path(route)
    made: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_') or 'root'}",
        "summary": route.summary, "tags": [_tag(route)],
        "parameters": [_reference("parameters", "request_id")],
        "responses": {str(route.status): _reply(route, schemas), **_errors(route, openai, schemas)},
    }
    for name in re.findall(r"\{(\w+)\}", path):
        made["parameters"].append({"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if route.keyed:
        names = ("class", "timeout", "tier") if DeadlineExceeded in route.errors else ("class",)
        made["parameters"] += [_reference("parameters", name) for name in names]
        if route.events is not None:
            made["parameters"].append(_reference("parameters", "event_ids" if route.method == "POST" else "last_event_id"))
        made["security"] = [{}, {"bearer": []}, {"key": []}]
    if route.body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas.of(route.body)}}}
    return made


def _tag(route: Route) -> str:
    if is_anthropic(route.path):
        return "Anthropic"
    return "OpenAI" if is_openai(route.path) else "native" if route.keyed else "operation"


def _reply(route: Route, schemas: _Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.reply is not None:
        content[route.media] = {"schema": schemas.of(route.reply)}
    description = "the answer"
    if route.events is not None:
        content["text/event-stream"] = {"schema": _events(route, schemas)}
        description = f"{description}; with `stream`, events" if route.reply is not None else "events"
    made: dict[str, Any] = {"description": description, "headers": _headers(route, "request_id")}
    if content:
        made["content"] = content
    return made


def _events(route: Route, schemas: _Schemas) -> dict[str, Any]:
    """One event of a stream; the data of the last one may be an error's, or OpenAI's end mark."""
    if route.named:
        kinds = [schemas.of(route.events), *([schemas.of(AnthropicError)] if is_anthropic(route.path) else [])]
        named: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
        properties = {"event": {"type": "string"}, "data": named}
        return {"type": "object", "properties": properties, "required": ["event", "data"]}
    several = isinstance(route.events, tuple)  # APIs
    openai = is_openai(route.path)
    kinds = [schemas.of(route.events)]
    kinds += [schemas.of(NativeError)] if several or not openai else []
    kinds += [schemas.of(OpenAIError)] if several or openai else []
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    if several or openai:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _errors(route: Route, openai: bool, schemas: _Schemas) -> dict[str, Any]:
    """The answers of a route's errors, by status."""
    by_status: dict[int, list[str]] = {}
    for kind in (*route.errors, *((NotFound,) if "{" in route.path else ())):
        by_status.setdefault(_status(kind, openai), []).append(inspect.cleandoc(kind.__doc__ or "").splitlines()[0])
    schema = schemas.of(AnthropicError if is_anthropic(route.path) else OpenAIError if openai else NativeError)
    return {
        str(status): {
            "description": " ".join(dict.fromkeys(texts)), "content": {"application/json": {"schema": schema}},
            "headers": _headers(route, "request_id", *(("retry_after",) if status in (429, 503) else ())),
        }
        for status, texts in sorted(by_status.items())
    }


def _status(kind: type[HeadraceError], openai: bool) -> int:
    row = mapping(kind("?"))
    return row.openai_http or row.http if openai else row.http


def _headers(route: Route, *names: str) -> dict[str, Any]:
    titles = {"request_id": ID_HEADER, "retry_after": "Retry-After"}
    more = RATES if route.keyed else ()
    return {titles.get(name, name): _reference("headers", name) for name in (*names, *more)}


def _reference(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}
