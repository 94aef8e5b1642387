"""One JSON value (RFC 8259), character by character."""

from __future__ import annotations

import re
from typing import Literal

Status = Literal["more", "done", "done before", "bad"]  # "done before": the value ended with the character before

MAX_DEPTH = 256
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_SCALAR_CHARACTERS = frozenset("truefalsn+-.0123456789E")
_BLANK = frozenset(" \t\r\n")


class JsonScanner:
    """Says of each character whether it can follow. Control characters within strings are let through."""

    __slots__ = ("_escaped", "_expected", "_scalar", "_stack", "_unicode", "in_string")

    def __init__(self) -> None:
        self._stack: list[str] = []  # closing brackets that are due
        self._expected = "value"  # or "value or end", "key", "key or end", "colon", "comma"
        self._scalar = ""
        self._escaped = False
        self._unicode = 0  # hexadecimal digits that are due
        self.in_string = False

    def push(self, char: str) -> Status:
        """What the next character means."""
        if self.in_string:
            return self._in_string(char)
        if self._scalar:
            return self._in_scalar(char)
        if char in _BLANK:
            return "more"
        return self._structure(char)

    def _in_string(self, char: str) -> Status:
        if self._unicode:
            self._unicode -= 1
            return "more" if char in "0123456789abcdefABCDEF" else "bad"
        if self._escaped:
            self._escaped = False
            self._unicode = 4 if char == "u" else 0
            return "more" if char in '"\\/bfnrtu' else "bad"
        if char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = False
            if self._expected == "key":
                self._expected = "colon"
                return "more"
            return self._ended()
        return "more"

    def _in_scalar(self, char: str) -> Status:
        if char in _SCALAR_CHARACTERS:
            self._scalar += char
            return "more" if len(self._scalar) < 400 else "bad"
        whole, self._scalar = _SCALAR.fullmatch(self._scalar), ""
        if not whole:
            return "bad"
        return "done before" if self._ended() == "done" else self.push(char)

    def _structure(self, char: str) -> Status:
        expected = self._expected
        if self._stack and char == self._stack[-1] and expected in ("comma", "value or end", "key or end"):
            self._stack.pop()
            return self._ended()
        if expected == "comma" and char == ",":
            self._expected = "key" if self._stack[-1] == "}" else "value"
        elif expected == "colon" and char == ":":
            self._expected = "value"
        elif expected.startswith("key") and char == '"':
            self._expected, self.in_string = "key", True
        elif not expected.startswith("value"):
            return "bad"
        elif char == '"':
            self._expected, self.in_string = "value", True
        elif char in "{[" and len(self._stack) < MAX_DEPTH:
            self._stack.append("}" if char == "{" else "]")
            self._expected = "key or end" if char == "{" else "value or end"
        elif char in "tfn-0123456789":
            self._scalar = char
        else:
            return "bad"
        return "more"

    def _ended(self) -> Status:
        self._expected = "comma"
        return "more" if self._stack else "done"
