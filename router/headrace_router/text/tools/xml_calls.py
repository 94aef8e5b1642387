"""Calls whose arguments stand between tags, one after the other."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from headrace_router.text.tools.machine import Call, End, Machine, Malformed, Reading

_LONGEST_NAME = 256  # characters


class Qwen3Coder(Machine):
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, of Qwen3-Coder and its successors.

    A value is a string or JSON, whichever the schema of the tool says. An argument is told when it is whole.
    """

    def read_output(self) -> Reading:
        while True:
            yield from self.find("<tool_call>")
            self._call = Call()
            try:
                yield from self._function()
            except Malformed:
                self.settle(ended=False)
                continue
            except End:
                self.settle(ended=True)
                raise
            self.settle(ended=False)
            yield from self.skip("</tool_call>")

    def _function(self) -> Reading:
        call = self._call
        yield from self._tag("<function=")
        call.name = self.check_name((yield from self._until(">", _LONGEST_NAME)).strip())
        begun = False
        while (yield from self._tag("<parameter=", "</function>")) == "<parameter=":
            key = (yield from self._until(">", _LONGEST_NAME)).strip()
            text = yield from self._until("</parameter>")
            value = _value(text.removeprefix("\n").removesuffix("\n"), self._tools[call.name], key)
            call.arguments += f"{', ' if begun else '{'}{json.dumps(key)}: {value}"
            begun = True
            if not self._whole:
                self.tell()
        call.arguments += "}" if begun else "{}"
        call.whole = True

    def _tag(self, *tags: str) -> Generator[None, str | None, str]:
        """Which of these comes next, after white space."""
        char = yield from self.skip_blanks()
        seen = char
        while seen not in tags:
            if not any(tag.startswith(seen) for tag in tags):
                raise self.refuse(char)
            char = yield from self.read()
            seen += char
        return seen

    def _until(self, marker: str, most: int | None = None) -> Generator[None, str | None, str]:
        """The text before a marker, which is read too."""
        made = ""
        while not made.endswith(marker):
            if most is not None and len(made) > most:
                raise Malformed
            made += yield from self.read()
        return made.removesuffix(marker)


def is_text(schema: object) -> bool:
    """Whether a value of this schema is a string, written as it is; else it is JSON."""
    if not isinstance(schema, dict) or schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"}:
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    return bool(schema.get("type", "string") == "string" and all(isinstance(value, str) for value in values))


def _value(text: str, schema: dict[str, Any], key: str) -> str:
    """A value as JSON."""
    properties = schema.get("properties")
    if not is_text(properties.get(key) if isinstance(properties, dict) else None):
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass  # a string, then
    return json.dumps(text, ensure_ascii=False)
