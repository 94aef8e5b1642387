"""Formats whose calls are JSON objects with a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any

from headrace_router.text.tools.machine import Call, End, Machine, Malformed, Reading, Tools

_ARGUMENTS = ("arguments", "parameters")
_AFTER_NAME = re.compile(r"\[(?:ARGS|CALL_ID)\]")
_LONGEST_NAME = 256  # characters, with what stands between a name and its arguments


class JsonMachine(Machine):
    """Reads calls that are JSON objects."""

    def call(self) -> Generator[None, str | None, bool]:
        """An object, whose first bracket comes next: was it a call? Else it is told as text."""
        self._call = Call()
        try:
            yield from self._object()
            self._call.arguments = self._call.arguments or ("" if self._call.begun else "{}")
            self._call.whole = True
        except Malformed:
            return self.settle(ended=False)
        except End:
            self.settle(ended=True)
            raise
        return self.settle(ended=False)

    def _object(self) -> Reading:
        char = yield from self.skip_blanks()
        if char != "{":
            raise self.refuse(char)
        while True:
            char = yield from self.skip_blanks()
            if char != '"':
                raise self.refuse(char)
            key = _loads((yield from self.value(char)))
            if (char := (yield from self.skip_blanks())) != ":":
                raise self.refuse(char)
            yield from self._member(key, (yield from self.skip_blanks()))
            char = yield from self.skip_blanks()
            if char == "}" and self._call.name is not None:
                return
            if char != ",":
                raise self.refuse(char)

    def _member(self, key: object, first: str) -> Reading:
        call = self._call
        if key in _ARGUMENTS and first == "{" and not call.whole:
            yield from self.arguments(first)
            return
        value = _loads((yield from self.value(first)))
        if key == "name":
            call.name = self.check_name(value)
        elif key in _ARGUMENTS:
            if isinstance(value, str):  # JSON within JSON
                call.arguments, value = value, _loads(value)
            if value is not None and not (isinstance(value, dict) and call.arguments):
                raise Malformed
            call.whole = bool(call.arguments)

    def calls(self, separators: str) -> Reading:
        """Objects one after the other, with one of these between two of them, or nothing."""
        while (yield from self.call()):
            char = yield from self.skip_blanks()
            if char in separators:
                char = yield from self.skip_blanks()
            self.unread(char)
            if char != "{":
                self.say()
                return
            self._held.clear()


class Hermes(JsonMachine):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, of Hermes and Qwen."""

    def read_output(self) -> Reading:
        while True:
            yield from self.find("<tool_call>")
            if (yield from self.call()):
                yield from self.skip("</tool_call>")


class Llama3(JsonMachine):
    """`{"name": …, "parameters": …}` as the whole output or after `<|python_tag|>`; several with `;` between them."""

    def read_output(self) -> Reading:
        char = yield from self.skip_blanks()
        self.unread(char)
        if char == "{":
            yield from self.calls(";,")
        while True:
            yield from self.find("<|python_tag|>")
            yield from self.calls(";,")


class Mistral(JsonMachine):
    """`[TOOL_CALLS][{"name": …, "arguments": …}, …]`, and the newer `[TOOL_CALLS]name[ARGS]{…}`.

    Args:
        inside: the marker is the end of the prompt.
    """

    def __init__(self, tools: Tools, whole: bool, inside: bool = False) -> None:
        self._inside = inside
        super().__init__(tools, whole)

    def read_output(self) -> Reading:
        while True:
            if not self._inside:
                yield from self.find("[TOOL_CALLS]")
            self._inside = False
            char = yield from self.skip_blanks()
            if char == "[":
                yield from self._list()
            elif char == "{":
                self.unread(char)
                yield from self.calls(",")
            else:
                yield from self._named(char)

    def _list(self) -> Reading:
        while (yield from self.call()):
            char = yield from self.skip_blanks()
            if char == "]":
                self._held.clear()
                return
            if char != ",":
                self.unread(char)
                self.say()
                return
            self._held.clear()

    def _named(self, char: str) -> Reading:
        call = self._call = Call()
        text = ""
        try:
            while char != "{":
                text += char
                if len(text) > _LONGEST_NAME:
                    raise Malformed
                char = yield from self.read()
            call.name = self.check_name(_AFTER_NAME.split(text)[0].strip())
            yield from self.arguments(char)
            self.settle(ended=False)
        except Malformed:
            self.settle(ended=False)
        except End:
            self.settle(ended=True)
            raise


def _loads(text: str) -> Any:
    """
    Raises:
        Malformed: the text is no JSON.
    """
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise Malformed from None
