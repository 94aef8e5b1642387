"""Chat templates: Jinja source that comes with a model, which is data from strangers.

Rendering equals transformers' (`transformers.utils.chat_template_utils`; a test holds them equal) with limits on work:
every loop iteration and macro call passes a check of steps and time, and repetition cannot build huge values.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from headrace._common.errors import TemplateError

MAX_SECONDS = 5.0
MAX_STEPS = 300_000
MAX_OUTPUT = 16_000_000  # characters


class LimitReached(jinja2.TemplateRuntimeError):
    """The template does more work than a chat can need."""


class _Budget(threading.local):
    """What the rendering of this thread may still do."""

    steps = 0
    deadline = 0.0

    def start(self) -> None:
        self.steps, self.deadline = 0, time.monotonic() + MAX_SECONDS

    def step(self) -> str:
        self.steps += 1
        if self.steps > MAX_STEPS or (self.steps % 256 == 0 and time.monotonic() > self.deadline):
            raise LimitReached("the chat template does not come to an end")
        return ""


class _Guard(NodeTransformer):
    """Puts a step of the budget into the body of every loop and macro."""

    def _guarded(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))  # type: ignore[attr-defined]
        return node

    visit_For = visit_Macro = visit_CallBlock = _guarded


class _Generation(jinja2.ext.Extension):
    """The `generation` tag, which only marks training data: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the interface of jinja2

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Any) -> Any:
        return caller()


class _Dict:
    """`dict` for templates, without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` for templates, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a keyword, as in jinja2
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, with a budget."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.budget = _Budget()
        self.filters["tojson"] = _tojson
        self.globals |= {
            "raise_exception": _raise_exception, "strftime_now": _strftime_now,
            "dict": _Dict(), "namespace": _Namespace,
        }

    def step(self) -> str:
        return self.budget.step()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        guarded: nodes.Template = _Guard().visit(parsed)
        return guarded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (not isinstance(left, float) and abs(right) > 1024):
            raise LimitReached("the chat template raises to a power that is too large")
        sized, times = (right, left) if isinstance(left, int) else (left, right)
        if operator == "*" and hasattr(sized, "__len__") and len(sized) * times > MAX_OUTPUT:
            raise LimitReached("the chat template builds a value that is too large")
        return super().call_binop(context, operator, left, right)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """A compiled chat template. Rendering takes up to MAX_SECONDS of a thread: call it from a pool."""

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        """`special_texts`: bos_token, eos_token, ... as the template may write them.

        Raises:
            TemplateError: the source is not Jinja.
        """
        self._environment = _Environment()
        self._special_texts = dict(special_texts)
        self._source = source
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"Template error: the model's chat template cannot be compiled: {error}") from None

    def mentions(self, word: str) -> bool:
        """Does the source hold `word`?"""
        return word in self._source

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of a conversation. `messages` are changed if the template manages to: pass a copy.

        Raises:
            TemplateError: the template refused the conversation, failed, or did not come to an end.
        """
        self._environment.budget.start()
        context = {
            "tools": None, "documents": None, **self._special_texts, **variables,
            "messages": messages, "add_generation_prompt": add_generation_prompt,
        }
        try:
            return "".join(_bounded(self._template.generate(context)))
        except jinja2.exceptions.SecurityError:
            raise TemplateError("Template error: the model's chat template does what templates may not") from None
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"Template error: {error}") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError) as error:
            kind = type(error).__name__  # its text may show internals
            raise TemplateError(f"Template error: the model's chat template failed with {kind}") from None


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_OUTPUT:
            raise LimitReached("the chat template writes too much")
        yield piece
