"""Which tools a call offers, and how its output is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace._common.errors import InvalidRequest
from headrace_router.api.openai_types import ChatBody
from headrace_router.api.tool_types import FunctionTool, Tool
from headrace_router.text.message import MessageReader
from headrace_router.text.pool import TextPool
from headrace_router.text.reasoning import ReasoningReader, is_begun
from headrace_router.text.tools.formats import FORMATS
from headrace_router.text.tools.json_calls import Mistral
from headrace_router.text.tools.machine import Machine

MODES = ("auto", "none", "required")


@dataclass(frozen=True)
class ToolUse:
    """The tools of one call.

    Attributes:
        functions: those that the model may call.
        forced: it has to call one of them.
        parallel: whether it may call several; None: not said.
        legacy: the call speaks of functions, not of tools.
    """

    functions: tuple[FunctionTool, ...]
    forced: bool
    parallel: bool | None
    legacy: bool

    @property
    def strict(self) -> bool:
        return any(function.strict for function in self.functions)


def tool_use(body: ChatBody) -> ToolUse | None:
    """What a body says about tools; None: the model gets none.

    Raises:
        InvalidRequest: the choice names no tool that there is, or is of no known shape.
    """
    legacy = body.functions is not None
    if legacy and body.tools is not None:
        raise InvalidRequest("`functions` and `tools` exclude each other", "functions")
    functions = tuple(body.functions or () if legacy else (tool.function for tool in body.tools or ()))
    field, given = ("function_call", body.function_call) if legacy else ("tool_choice", body.tool_choice)
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have the same name", "functions" if legacy else "tools")
    choice = _choice(given, names, field)
    if not functions or choice == "none":
        return None
    chosen = tuple(f for f in functions if f.name == choice[0]) if isinstance(choice, tuple) else functions
    parallel = False if legacy else body.parallel_tool_calls
    return ToolUse(chosen, choice == "required" or isinstance(choice, tuple), parallel, legacy)


def _choice(given: Any, names: list[str], field: str) -> str | tuple[str]:
    """One of `MODES`, or the name of the tool to call."""
    if given is None or given in ("auto", "none"):
        return given or "auto"
    if not names:
        raise InvalidRequest(f"`{field}` needs {'functions' if field == 'function_call' else 'tools'}", field)
    if given == "required":
        return "required"
    name = given
    if isinstance(given, dict):
        if given.get("type", "function") != "function":
            raise InvalidRequest(f"`{field}` of the type {given['type']!r} is not supported", field)
        inner = given.get("function", given)
        name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"`{field}` must be one of {', '.join(MODES)}, or name a function", field)
    if name not in names:
        raise InvalidRequest(f"`{field}` names {name!r}, which is none of the tools", field)
    return (name,)


def plain_tools(functions: tuple[FunctionTool, ...]) -> list[dict[str, Any]]:
    """Tools as templates want them: OpenAI's form, always with a schema."""
    made = []
    for function in functions:
        shown: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            shown["description"] = function.description
        made.append({"type": "function", "function": {**shown, "parameters": function.schema}})
    return made


def offered(tools: list[Tool] | None) -> tuple[FunctionTool, ...]:
    """The functions of a list of tools."""
    return tuple(tool.function for tool in tools or ())


@dataclass(frozen=True)
class Reading:
    """How the outputs of one call are read.

    Attributes:
        begun: the prompt ends within the thoughts.
        thinks: the output may hold thoughts.
        inside: the prompt ends with the marker of calls.
    """

    pool: TextPool
    use: ToolUse | None = None
    thinks: bool = False
    begun: bool = False
    inside: bool = False

    @classmethod
    def after(cls, pool: TextPool, prompt: str, use: ToolUse | None, constrained: bool, inside: bool) -> Reading:
        """After this prompt. `constrained`: a grammar leaves no place for thoughts."""
        thinks = pool.reasoning is not None and not constrained
        begun = thinks and pool.reasoning is not None and is_begun(pool.reasoning, prompt)
        return cls(pool, use, thinks, begun, inside)

    @property
    def markers(self) -> tuple[int, ...]:
        """Special tokens whose text has to reach the reader."""
        texts = list(self.pool.tools.markers) if self.use is not None else []
        if self.thinks and self.pool.reasoning is not None:
            texts += [self.pool.reasoning.begin, self.pool.reasoning.end]
        found = {self.pool.tokenizer.id_of(text) for text in texts}
        return tuple(sorted(i for i in found if i is not None and i in self.pool.tokenizer.special_ids))

    def reader(self, whole: bool) -> MessageReader:
        """A reader of one output. `whole`: nothing is shown before its end."""
        tags = self.pool.reasoning if self.thinks else None
        reasoning = ReasoningReader(tags, self.begun) if tags is not None else None
        parallel = self.use is None or self.use.parallel is not False
        return MessageReader(reasoning, self._machine(whole), parallel)

    def _machine(self, whole: bool) -> Machine | None:
        if self.use is None:
            return None
        tools = {function.name: function.schema for function in self.use.functions}
        if self.inside:
            return Mistral(tools, whole, inside=True)
        made = self.pool.tools
        if self.use.forced and made.forced:
            made = FORMATS[made.forced]
        return made.machine(tools, whole)
