"""What a model thinks before it answers, told from its answer by the tags around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace_router.text.parts import Part, Reasoning, Text


@dataclass(frozen=True)
class Tags:
    """How a family of models marks what it thinks. `implied`: it begins to think without saying so."""

    name: str
    begin: str
    end: str
    implied: bool = False


TAGS = {made.name: made for made in (
    Tags("think", "<think>", "</think>"), Tags("deepseek_r1", "<think>", "</think>", implied=True),
    Tags("mistral", "[THINK]", "[/THINK]"),
)}
PARSERS = ("auto", "none", *TAGS)


def choose(parser: str, mentions: Callable[[str], bool]) -> Tags | None:
    """The tags that are named, or those of the template; None: there are none."""
    if parser != "auto":
        return TAGS.get(parser)
    return next((TAGS[name] for name in ("think", "mistral") if mentions(TAGS[name].end)), None)


def is_begun(tags: Tags, prompt: str) -> bool:
    """Does an output after this prompt begin with thoughts? Some templates write the first tag themselves."""
    return prompt.rstrip().endswith(tags.begin) or (tags.implied and not prompt.rstrip().endswith(tags.end))


class ReasoningReader:
    """Tells thoughts from the answer, however the text is cut into pieces. White space beside tags is dropped."""

    def __init__(self, tags: Tags, begun: bool) -> None:
        """`begun`: the prompt ends within the thoughts."""
        self._tags = tags
        self._state: Literal["start", "thinking", "answer"] = "thinking" if begun else "start"
        self._held = ""
        self._fresh = begun  # nothing but white space since the last tag

    @property
    def thinking(self) -> bool:
        return self._state == "thinking"

    def push(self, text: str) -> list[Part]:
        """The parts that the next piece of text makes."""
        self._held += text
        made: list[Part] = []
        if self._state == "start":
            self._start()
        if self._state == "thinking":
            self._think(made)
        if self._state == "answer":
            self._answer(made)
        return made

    def finish(self) -> list[Part]:
        """What is left when nothing follows."""
        held, self._held = self._held, ""
        if self.thinking:
            return [Reasoning(held)] if held.strip() else []
        return [Text(held)] if held and not (self._fresh and not held.strip()) else []

    def _start(self) -> None:
        begin, seen = self._tags.begin, self._held.lstrip()
        if seen.startswith(begin):
            self._state, self._held, self._fresh = "thinking", seen[len(begin) :], True
        elif not begin.startswith(seen):
            self._state = "answer"

    def _think(self, made: list[Part]) -> None:
        before, tag, after = self._held.partition(self._tags.end)
        kept = before.rstrip() if tag else before[: len(before) - self._undecided(before)].rstrip()
        self._held = after if tag else before[len(kept) :]
        if self._fresh:
            kept = kept.lstrip()
        if kept:
            made.append(Reasoning(kept))
            self._fresh = False
        if tag:
            self._state, self._fresh = "answer", True

    def _undecided(self, text: str) -> int:
        """How many of the last characters may belong to the closing tag."""
        end = self._tags.end
        return next(n for n in range(min(len(end) - 1, len(text)), -1, -1) if end.startswith(text[len(text) - n :]))

    def _answer(self, made: list[Part]) -> None:
        text = self._held.lstrip() if self._fresh else self._held
        if text:
            made.append(Text(text))
            self._held, self._fresh = "", False
