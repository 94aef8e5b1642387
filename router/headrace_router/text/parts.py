"""What an assistant's output is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins; pieces of its arguments follow until the next part of another kind."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments, which are a JSON object."""

    text: str


Part = Reasoning | Text | CallBegin | Arguments


def merged(parts: list[Part]) -> list[Part]:
    """The same parts, neighbours of one kind joined."""
    made: list[Part] = []
    for part in parts:
        last = made[-1] if made else None
        if type(last) is type(part) and not isinstance(part, CallBegin):
            made[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        else:
            made.append(part)
    return made
