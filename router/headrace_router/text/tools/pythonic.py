"""Calls as Python writes them."""

from __future__ import annotations

import ast
import json
from typing import Any

from headrace_router.text.tools.machine import Call, End, Machine, Malformed, Reading

_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None}


class Pythonic(Machine):
    """`[f(a=1), g()]` as the whole output or between `<|python_start|>` and `<|python_end|>`, of Llama 3.2 and 4."""

    def read_output(self) -> Reading:
        char = yield from self.skip_blanks()
        if char == "[":
            yield from self._list()
        else:
            self.unread(char)
        while True:
            yield from self.find("<|python_start|>")
            char = yield from self.skip_blanks()
            if char == "[":
                yield from self._list()
            else:
                self.unread(char)

    def _list(self) -> Reading:
        """The rest of a list of calls. A call is told when it is whole."""
        while True:
            self._call = Call()
            try:
                yield from self._one()
            except Malformed:
                self.settle(ended=False)
                return
            except End:
                self.settle(ended=True)
                raise
            self.settle(ended=False)
            char = yield from self.skip_blanks()
            if char == "]":
                yield from self.skip("<|python_end|>")
                return
            if char != ",":
                self.unread(char)
                self.say()
                return

    def _one(self) -> Reading:
        name, char = "", (yield from self.skip_blanks())
        while char != "(":
            name += char
            if not any(known.startswith(name) for known in self._tools):
                raise self.refuse(char)
            char = yield from self.read()
        self.check_name(name)
        source, due, quote, escaped = "f(", [")"], "", False
        while due:
            char = yield from self.read()
            source += char
            if quote:
                quote = "" if char == quote and not escaped else quote
                escaped = char == "\\" and not escaped
            elif char in "'\"":
                quote, escaped = char, False
            elif char in _BRACKETS:
                due.append(_BRACKETS[char])
            elif char in ")]}" and due.pop() != char:
                raise self.refuse(char)
        self._call.arguments, self._call.name, self._call.whole = _as_json(source), name, True


def _as_json(source: str) -> str:
    """The keyword arguments of a call as a JSON object.

    Raises:
        Malformed: it is no call with constant keyword arguments.
    """
    try:
        node = ast.parse(source, mode="eval").body
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            raise Malformed
        made = {_name(source, keyword): _constant(keyword.value) for keyword in node.keywords}
        text = json.dumps(made, ensure_ascii=False, allow_nan=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16")  # escapes of JSON write a character in two halves
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _name(source: str, keyword: ast.keyword) -> str:
    """A keyword as it is written; Python's own reading of it is another Unicode form of some letters."""
    written = ast.get_source_segment(source, keyword)
    assert written is not None
    return written.partition("=")[0].strip()


def _constant(node: ast.expr) -> Any:
    """The value of a literal; JSON's names of constants count too."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_constant(item) for item in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_constant(k): _constant(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    return ast.literal_eval(node)
