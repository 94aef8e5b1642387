"""The OpenAPI document as one HTML page that needs neither scripts nor anything from elsewhere."""

from __future__ import annotations

import json
from html import escape
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d0d7de }
code, pre, .path { font-family: ui-monospace, monospace; font-size: .9em }
pre { background: #f3f5f7; padding: .75rem; overflow-x: auto; border-radius: 6px }
details { border: 1px solid #d0d7de; border-radius: 6px; margin: .5rem 0; padding: 0 .75rem }
summary { cursor: pointer; padding: .5rem 0 }
details[open] > summary { border-bottom: 1px solid #d0d7de; margin-bottom: .75rem }
.method { display: inline-block; min-width: 3.2rem; font-weight: 600; font-size: .85em }
.post { color: #1a7f37 } .get { color: #0550ae } .key { color: #9a6700; font-size: .85em; float: right }
.path { font-weight: 600; margin-right: .75rem }
table { border-collapse: collapse; width: 100%; margin-bottom: 1rem } th { font-weight: 600 }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #eaeef2 }
a { color: #0550ae }
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0d1117 } pre { background: #161b22 } a, .get { color: #79c0ff } .post { color: #56d364 }
  .key { color: #e3b341 } details, details[open] > summary, h2, td, th { border-color: #30363d }
}
"""

INTRO = """
<p>{description} The same as a document for programs: <a href="openapi.json">openapi.json</a>.</p>
<p>Where API keys are set, routes marked <span class="method">key</span> need one: <code>Authorization: Bearer KEY</code>
or <code>x-api-key: KEY</code>.</p>
"""


def make_page(document: dict[str, Any]) -> str:
    """The page of a document that `openapi.make_document` made."""
    about = document["info"]
    parts = [
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(about['title'])} API</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(about['title'])} API</h1><p>version {escape(about['version'])}</p>",
        INTRO.format(description=escape(about["description"])),
    ]
    operations = [
        (method, path, operation) for path, item in document["paths"].items() for method, operation in item.items()
    ]
    for tag in dict.fromkeys(operation["tags"][0] for _, _, operation in operations):
        parts.append(f"<h2>{escape(tag[0].upper() + tag[1:])}</h2>")
        parts += [_operation(document, *row) for row in operations if row[2]["tags"][0] == tag]
    parts.append("<h2>Types</h2>")
    parts += [_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return "\n".join([*parts, "</body></html>", ""])


def _operation(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    key = '<span class="key">key</span>' if "security" in operation else ""
    parts = [
        f'<details id="{escape(operation["operationId"])}"><summary>{key}<span class="method {method}">{method.upper()}</span> '
        f'<span class="path">{escape(path)}</span>{escape(operation["summary"])}</summary>'
    ]
    if body := operation.get("requestBody"):
        schema = body["content"]["application/json"]["schema"]
        parts.append(f"<p>Body: {_kind(schema)}</p><pre>{escape(_curl(document, path, schema))}</pre>")
    rows = [_parameter(_resolve(document, parameter)) for parameter in operation["parameters"]]
    parts.append(f"<table><tr><th>Header or parameter<th>Kind<th>Meaning</tr>{''.join(rows)}</table>")
    rows = [_response(status, response) for status, response in operation["responses"].items()]
    parts.append(f"<table><tr><th>Status<th>Body<th>When</tr>{''.join(rows)}</table></details>")
    return "".join(parts)


def _curl(document: dict[str, Any], path: str, schema: dict[str, Any]) -> str:
    """A call that one can try: the required members with values of their kind."""
    shape = _resolve(document, schema)
    samples = {"messages": [{"role": "user", "content": "Hello"}]}
    body = {name: samples.get(name, "Hello") for name in shape.get("required", ())}
    return f"curl http://HOST:PORT{path} -H 'Content-Type: application/json' \\\n  -d '{json.dumps(body)}'"


def _parameter(parameter: dict[str, Any]) -> str:
    text = escape(parameter.get("description", ""))
    return f"<tr><td><code>{escape(parameter['name'])}</code><td>{_kind(parameter['schema'])}<td>{text}</tr>"


def _response(status: str, response: dict[str, Any]) -> str:
    bodies = [
        f"{escape(media)}: {_kind(content['schema'])}"
        for media, content in response.get("content", {}).items()
    ]
    return f"<tr><td>{status}<td>{'<br>'.join(bodies)}<td>{escape(response['description'])}</tr>"


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(field)}</code><td>{_kind(kind)}<td>{'required' if field in required else ''}</tr>"
        for field, kind in schema.get("properties", {}).items()
    ]
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    table = f"<table><tr><th>Member<th>Kind<th></tr>{''.join(rows)}</table>" if rows else f"<p>{_kind(schema)}</p>"
    return f'<details id="{escape(name)}"><summary><span class="path">{escape(name)}</span></summary>{about}{table}</details>'


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words, with links."""
    if reference := schema.get("$ref"):
        name = escape(reference.rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    if options := schema.get("anyOf"):
        return " or ".join(_kind(option) for option in options)
    if data := schema.get("properties", {}).get("data"):
        return f"events of {_kind(data)}"
    if content := schema.get("contentSchema"):
        return _kind(content)
    if "enum" in schema or "const" in schema:
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema.get("enum", [schema.get("const")]))
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [f"{sign} {schema[key]}" for key, sign in (("minimum", "≥"), ("maximum", "≤")) if key in schema]
    return f"{kind} {escape(', '.join(bounds))}".strip()


def _resolve(document: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """What a reference points to; anything else as it is."""
    if "$ref" not in node:
        return node
    found: Any = document
    for part in node["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return dict(found)
