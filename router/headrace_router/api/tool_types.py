"""JSON shapes of tools and calls, as OpenAI has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class FunctionTool(Struct):
    """A function that the model may call. `arguments`: TGI's name of `parameters`."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of its arguments."""
        return self.parameters or self.arguments or {"type": "object", "properties": {}}


class Tool(Struct):
    """A tool; only functions are offered."""

    function: FunctionTool
    type: Literal["function"] = "function"


class FunctionCall(Struct, omit_defaults=True):
    """A call: its name, and its arguments as JSON in a string; in a body they may be an object too."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class FunctionCalled(Struct):
    """A call that the model makes. `arguments`: JSON."""

    name: str
    arguments: str


class ToolCalled(Struct):
    id: str
    function: FunctionCalled
    type: Literal["function"] = "function"


class FunctionDelta(Struct, omit_defaults=True):
    """A piece of a call: the name comes first, then the arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolDelta(Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None
