"""What a chat template may cost: a budget of steps, time and text for one rendering, and the places where it is spent.

Loops and macros take a step each time around, filters each time they are called. Whatever makes text out of text says
beforehand how much: outputs, `~`, `+`, `*`, `%`, string methods and filters.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0
MAX_STEPS = 300_000
MAX_TEXT = 64_000_000  # characters, of all values that are made on the way
MAX_SIZE = 500  # a width, an indent, a count
MAX_POWER = 1024
_WIDTH = re.compile(  # in a format: a large one, or one that is an argument
    r"%(\([^)]*\))?[-+ #0]*(\d{4}|\d*\.\d{4}|\d*\.?\*)|\{[^{}]*:[^{}]*(\d{4}|\{)"
)
_SIZED = frozenset([
    "batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "wordwrap", "zfill",
])
_ONLY_LOOKS = frozenset([
    "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "length", "default", "d", "first", "last",
])
_WRITES = frozenset([
    "tojson", "string", "pprint", "upper", "lower", "title", "capitalize", "trim", "striptags", "escape", "e", "forceescape",
    "urlencode", "xmlattr", "replace", "center", "indent", "wordwrap", "truncate", "format", "safe", "urlize",
])


class LimitReached(jinja2.TemplateRuntimeError):
    """The template does more work than a chat can need."""


class Budget(threading.local):
    """What the rendering of this thread may still do."""

    steps = 0
    text = 0
    deadline = 0.0

    def start(self) -> None:
        self.steps, self.text, self.deadline = MAX_STEPS, MAX_TEXT, time.monotonic() + MAX_SECONDS

    def step(self, text: int = 0) -> str:
        """Once around; `text`: characters that stand there in the source."""
        self.steps -= 1
        if self.steps < 0 or (self.steps % 64 == 0 and time.monotonic() > self.deadline):
            raise LimitReached("the chat template does not come to an end")
        if text:
            self.make(text)
        return ""

    def make(self, text: int) -> None:
        """So many characters are about to be made."""
        self.text -= text
        if self.text < 0:
            raise LimitReached("the chat template makes too much text")

    def output(self, value: Any) -> Any:
        """A value is about to be written."""
        self.make(_size(value, self.text))
        return value

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """`left operator right` is about to be computed."""
        if operator == "**":
            if not isinstance(left, float) and abs(right) > MAX_POWER:
                raise LimitReached("the chat template raises to a power that is too large")
        elif operator == "+" and isinstance(left, (str, list, tuple)) and hasattr(right, "__len__"):
            self.make(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            self.check_call("format", left, right if isinstance(right, tuple) else (right,))
            if isinstance(right, tuple) and not all(isinstance(item, (str, int, float)) for item in right):
                self.make(left.count("%") * _size(right, self.text))
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 1 << 16:
                raise LimitReached("the chat template computes a number that is too large")
            sized, times = (right, left) if isinstance(left, int) else (left, right)
            if hasattr(sized, "__len__") and isinstance(times, int):
                self.make(len(sized) * max(times, 0))

    def check_call(self, name: str, value: Any, rest: tuple[Any, ...]) -> None:
        """The method or filter `name` of `value` is about to be called."""
        if name in _SIZED and any(_is_large(item) for item in rest):
            raise LimitReached("the chat template asks for a size that is too large")
        if name in _ONLY_LOOKS:
            return
        if isinstance(value, str):
            self.make(len(value) + _added(name, value, rest, self.text))
        elif name in _WRITES:
            self.make(_size(value, self.text))


def _is_large(value: Any) -> bool:
    size = len(value) if isinstance(value, str) else value
    return isinstance(size, int) and abs(size) > MAX_SIZE


def _size(value: Any, most: int) -> int:
    """Characters of a value's text, about; once it is more than `most`, counting ends."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return _size([*value, *value.values()], most)
    if not isinstance(value, (list, tuple)):
        return 1
    size = len(value)
    for item in value:
        if size > most:
            break
        size += _size(item, most - size)
    return size


def _added(name: str, value: str, rest: tuple[Any, ...], most: int) -> int:
    """Characters that a method or filter of a text may add to it."""
    if name == "translate":
        raise LimitReached("a chat template may not translate characters")
    if name in ("format", "format_map"):
        if _WIDTH.search(value):
            raise LimitReached("the chat template asks for a width that is too large")
        return (value.count("{") + value.count("%")) * _size(rest, most)
    if name == "replace" and len(rest) >= 2 and isinstance(rest[0], str) and isinstance(rest[1], str):
        return value.count(rest[0]) * len(rest[1])
    if name == "join" and rest:
        return _size(rest[0], most) + len(value) * (len(rest[0]) if isinstance(rest[0], list) else 1)
    if name in ("indent", "expandtabs", "wordwrap"):
        return (value.count("\n") + value.count("\t") + 1) * MAX_SIZE
    return 0


class Guard(NodeTransformer):
    """Puts the budget's steps into a template: into the body of every loop and macro, and the condition of every loop."""

    def _guarded(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        body: list[nodes.Node] = node.body  # type: ignore[attr-defined]
        literal = sum(len(data.data) for part in body for data in part.find_all(nodes.TemplateData))
        body.insert(0, nodes.ExprStmt(self._step(node.lineno, literal), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = _guarded

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """A condition runs without the body: it takes a step of its own."""
        self._guarded(node)
        if node.test is not None:
            node.test = nodes.Or(self._step(node.lineno, 0), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`~`"""
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("concat_checked"), node.nodes, [], None, None, lineno=node.lineno)

    @staticmethod
    def _step(line: int, text: int) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute("step"), [nodes.Const(text)], [], None, None, lineno=line)


def guard_filters(filters: dict[str, Callable[..., Any]], budget: Budget) -> None:
    """Let every filter take a step, and check what it is given."""
    for name, function in list(filters.items()):
        filters[name] = _guarded_filter(name, function, budget)


def _guarded_filter(name: str, function: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, environment or evaluation context

    @functools.wraps(function)
    def guarded(*args: Any, **options: Any) -> Any:
        budget.step()
        value, rest = args[first], (*args[first + 1 :], *options.values())
        if name == "join":
            value = list(value)
            between = rest[0] if rest and isinstance(rest[0], str) else ""
            budget.make(_size(value, budget.text) + len(between) * len(value))
            args = (*args[:first], value, *args[first + 1 :])
        else:
            budget.check_call(name, value, rest)
        return function(*args, **options)

    return guarded
