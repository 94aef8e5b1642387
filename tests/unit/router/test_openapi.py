"""The OpenAPI document and its page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import jsonschema
import msgspec
import pytest
from aiohttp import web

from headrace._common.errors import TABLE, HeadraceError, Overloaded, mapping
from headrace_router.api import native_types, openai_types
from headrace_router.api.docs_page import make_page
from headrace_router.api.errors import answer
from headrace_router.api.openapi import make_document
from headrace_router.api.routes import ROUTES, Route

DOCUMENT = make_document(ROUTES)


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [(m.upper(), path, op) for path, item in DOCUMENT["paths"].items() for m, op in item.items()]


def resolved(node: Any) -> Any:
    """What a reference points to."""
    while isinstance(node, dict) and "$ref" in node:
        found: Any = DOCUMENT
        for part in node["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        node = found
    return node


def test_all_references_lead_somewhere() -> None:
    for name in re.findall(r'"\$ref": "([^"]+)"', json.dumps(DOCUMENT)):
        assert resolved({"$ref": name})


def test_schemas_are_schemas() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_operation_ids_are_unique() -> None:
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(ids)) == len(ids) == len(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_each_route_says_what_it_takes_and_answers(route: Route) -> None:
    shown = route.method, re.sub(r":[^}]*", "", route.path)
    operation = next(operation for method, path, operation in operations() if (method, path) == shown)
    assert ("security" in operation) == route.keyed
    assert ("requestBody" in operation) == (route.method == "POST" and not route.public)
    content = operation["responses"][str(route.status)].get("content", {})
    assert ("text/event-stream" in content) == (route.events is not None)
    assert (route.media in content) == (route.reply is not None)
    if route.method == "POST" and not route.public:
        names = {resolved(parameter)["name"] for parameter in operation["parameters"]}
        assert {"X-Request-Id", "X-Headrace-Class"} <= names
        assert ("X-Request-Timeout-Ms" in names) == ("X-Headrace-Min-Tier" in names) == ("token" not in route.path)
        assert {"400", "401", "403", "408", "413", "415", "429"} <= set(operation["responses"])
        assert "Retry-After" in operation["responses"]["429"]["headers"]


@pytest.mark.parametrize("kind", [kind for route in ROUTES if route.path == "/generate" for kind in route.errors])
def test_errors_are_as_documented(kind: type[HeadraceError]) -> None:
    for path in ("/generate", "/v1/completions", "/v1/messages"):
        made = answer(path, kind("text"))
        assert isinstance(made.body, bytes)
        response = DOCUMENT["paths"][path]["post"]["responses"][str(made.status)]
        schema = {**resolved(response["content"]["application/json"]["schema"]), "components": DOCUMENT["components"]}
        jsonschema.validate(json.loads(made.body), schema)


def test_bodies_are_those_that_validate() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert set(schemas["ChatBody"]["properties"]) == {f.encode_name for f in msgspec.structs.fields(openai_types.ChatBody)}
    assert schemas["GenerateBody"]["required"] == ["inputs"]
    for body in ({"inputs": "x"}, {"inputs": "x", "parameters": None}, {"inputs": "x", "parameters": {"top_k": -5}}):
        msgspec.convert(body, native_types.GenerateBody)
        jsonschema.validate(body, {**schemas["GenerateBody"], "components": DOCUMENT["components"]})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"inputs": 5}, {**schemas["GenerateBody"], "components": DOCUMENT["components"]})


def test_every_error_of_http_is_on_some_route() -> None:
    known = {kind for route in ROUTES for kind in route.errors}
    http_only = {"UriTooLong", "HeadersTooLarge", "MethodNotAllowed", "NotFound", "AlreadyExists", "StartupError"}
    assert {kind.__name__ for kind in set(TABLE) - known} <= http_only
    assert mapping(Overloaded("x")).http == 429


class Page(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("href", "src", "action") and value:
                self.links.append(value)
            if name == "id" and value:
                self.ids.append(value)


def test_the_page_shows_all_and_needs_nothing() -> None:
    text = make_page(DOCUMENT)
    page = Page()
    page.feed(text)
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert "url(" not in text
    assert set(page.links) - {"openapi.json"} <= {f"#{name}" for name in page.ids}
    assert len(page.ids) == len(set(page.ids))
    assert all(operation["operationId"] in page.ids for _, _, operation in operations())
    assert set(DOCUMENT["components"]["schemas"]) <= set(page.ids)


def test_the_page_escapes() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response()

    page = make_page(make_document([Route("GET", "/x", handler, "<script>alert(1)</script>")]))
    assert "<script>" not in page
