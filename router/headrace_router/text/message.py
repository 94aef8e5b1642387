"""The output of an assistant, read as it comes: thoughts, answer, calls of tools."""

from __future__ import annotations

from headrace_router.text.parts import CallBegin, Part, Text, merged
from headrace_router.text.reasoning import ReasoningReader
from headrace_router.text.tools.machine import Machine


class MessageReader:
    """Reads one output. `parallel`: it may hold more than one call; else those after the first are dropped."""

    def __init__(self, reasoning: ReasoningReader | None, tools: Machine | None, parallel: bool = True) -> None:
        self._reasoning, self._tools, self._parallel = reasoning, tools, parallel
        self.calls = 0  # told
        self._begun = 0
        self.reasoning_tokens = 0

    def push(self, text: str) -> list[Part]:
        """The parts that the next token's text makes."""
        if self._reasoning is None:
            return self._answer([Text(text)] if text else [])
        self.reasoning_tokens += self._reasoning.thinking
        return self._answer(self._reasoning.push(text))

    def finish(self, cut: bool) -> list[Part]:
        """The parts that are left when nothing follows. `cut`: the model would have gone on."""
        made = self._answer(self._reasoning.finish() if self._reasoning is not None else [])
        if self._tools is not None:
            made += self._counted(self._tools.finish(cut))
        return merged(made)

    def whole(self, texts: list[str], cut: bool) -> list[Part]:
        """All parts of an output, of the texts of its tokens."""
        return merged([part for text in texts for part in self.push(text)] + self.finish(cut))

    def _answer(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        made: list[Part] = []
        for part in parts:
            made += self._counted(self._tools.push(part.text)) if isinstance(part, Text) else [part]
        return made

    def _counted(self, parts: list[Part]) -> list[Part]:
        made: list[Part] = []
        for part in parts:
            begins = isinstance(part, CallBegin)
            self._begun += begins
            if isinstance(part, Text) or self._parallel or self._begun < 2:
                self.calls += begins
                made.append(part)
        return made
