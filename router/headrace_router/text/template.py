"""Chat templates: Jinja source that comes with a model, which is data from strangers.

Rendering equals transformers' (`transformers.utils.chat_template_utils`; a test holds them equal) within the limits of
`template_limits.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace._common.errors import TemplateError
from headrace_router.text.template_limits import Budget, Guard, guard_filters


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

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=self.budget.output,
        )
        self.filters["tojson"] = _tojson
        guard_filters(self.filters, self.budget)
        del self.globals["lipsum"]  # no conversation needs it, and it takes its time
        self.globals |= {
            "raise_exception": _raise_exception, "strftime_now": _strftime_now,
            "dict": _Dict(), "namespace": _Namespace,
        }

    def step(self, text: int) -> str:
        return self.budget.step(text)

    def concat_checked(self, *values: Any) -> str:
        """`~`"""
        return "".join([str(self.budget.output(value)) for value in values])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        guarded: nodes.Template = Guard().visit(parsed)
        return guarded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **options: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
            __self.budget.check_call(method.__name__, owner, (*args, *options.values()))
        return super().call(__context, __obj, *args, **options)


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

    @property
    def literals(self) -> str:
        """The texts that stand in the template, each on its own: no search finds anything over two of them."""
        parsed = self._environment.parse(self._source)
        found = [data.data for data in parsed.find_all(nodes.TemplateData)]
        found += [const.value for const in parsed.find_all(nodes.Const) if isinstance(const.value, str)]
        return "\0".join(found)

    def mentions(self, word: str) -> bool:
        """Does the source hold `word`?"""
        return word in self._source

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, /, **variables: Any) -> str:
        """The prompt text of a conversation. `messages` are changed if the template manages to: pass a copy. `variables`
        may have any names; those of the other arguments are taken.

        Raises:
            TemplateError: the template refused the conversation, failed, or did not come to an end.
        """
        self._environment.budget.start()
        context = {
            "tools": None, "documents": None, **self._special_texts, **variables,
            "messages": messages, "add_generation_prompt": add_generation_prompt,
        }
        try:
            made = self._template.render(context)
            made.encode()  # an escape in a template can write half a character, which no tokenizer takes
            return made
        except jinja2.exceptions.SecurityError:
            raise TemplateError("Template error: the model's chat template does what templates may not") from None
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"Template error: {error}") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError) as error:
            kind = type(error).__name__  # its text may show internals
            raise TemplateError(f"Template error: the model's chat template failed with {kind}") from None
