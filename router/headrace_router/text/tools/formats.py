"""The formats by name, and which of them a chat template is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace_router.text.tools.json_calls import Hermes, Llama3, Mistral
from headrace_router.text.tools.machine import Machine, Tools
from headrace_router.text.tools.pythonic import Pythonic
from headrace_router.text.tools.xml_calls import Qwen3Coder


class MakeMachine(Protocol):
    def __call__(self, tools: Tools, whole: bool) -> Machine: ...


@dataclass(frozen=True)
class Format:
    """How a family of models writes calls.

    Attributes:
        markers: texts of its markup that are special tokens in some vocabularies; they have to reach the parser.
        signs: a template that holds one of these is for it.
        forced: the format in which a grammar writes calls; this one if it is empty.
    """

    name: str
    machine: MakeMachine
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    forced: str = ""


FORMATS = {made.name: made for made in (
    Format("mistral", Mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), ("[TOOL_CALLS]",)),
    Format("pythonic", Pythonic, ("<|python_start|>", "<|python_end|>"), ("<|python_start|>", "[func_name1("), "llama3_json"),
    Format("qwen3_coder", Qwen3Coder, ("<tool_call>", "</tool_call>"), ("<function=",), "hermes"),
    Format("hermes", Hermes, ("<tool_call>", "</tool_call>"), ("<tool_call>",)),
    Format("llama3_json", Llama3, ("<|python_tag|>",), ("<|python_tag|>", '{"name": function name, "parameters":')),
)}
PARSERS = ("auto", *FORMATS)


def choose(parser: str, mentions: Callable[[str], bool]) -> Format:
    """The format that is named, or that of the template; Hermes' where that shows none. `mentions`: does the template hold
    this text?
    """
    if parser != "auto":
        return FORMATS[parser]
    return next((made for made in FORMATS.values() if any(map(mentions, made.signs))), FORMATS["hermes"])
