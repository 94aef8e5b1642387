"""Streams of Server-Sent Events as a load client reads them: time-stamped chunks first, their meaning afterwards.

Parsing waits until the load has run, so that the client takes as little of the CPU as it can.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["completions", "chat", "tgi"]
Chunk = tuple[float, bytes]  # when it came (seconds), what came


@dataclass
class Answer:
    """One stream. `times`: of each event that carries output, in seconds; `first`: of the first with text in it."""

    times: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int | None = None  # as the server counts them
    completion_tokens: int | None = None
    error: str | None = None
    first: float | None = None

    @property
    def tokens(self) -> int:
        """Output tokens; where the server does not say, its events."""
        return len(self.times) if self.completion_tokens is None else self.completion_tokens


def frames(chunks: Iterable[Chunk]) -> Iterator[tuple[float, str]]:
    """(time at which it was complete, data) of every event with data but [DONE]."""
    rest = b""
    for time, chunk in chunks:
        *whole, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if data and data != b"[DONE]":
                    yield time, data.decode()


def read_answer(api: Api, chunks: Iterable[Chunk]) -> Answer:
    """What a stream said."""
    answer, parts = Answer(), []
    for time, data in frames(chunks):
        try:
            event = json.loads(data)
        except ValueError:
            answer.error = f"not JSON: {data[:80]!r}"
            continue
        if event.get("error"):
            answer.error = str(event["error"])[:200]
            continue
        text = _read_tgi(event, answer) if api == "tgi" else _read_openai(event, answer)
        if text is not None:
            answer.times.append(time)
            if text and answer.first is None:
                answer.first = time
            parts.append(text)
    answer.text = "".join(parts)
    if answer.error is None and not answer.times:
        answer.error = "no output"
    return answer


def _read_tgi(event: dict[str, Any], answer: Answer) -> str | None:
    """The text of an event that is an output token, "" for a special one."""
    if details := event.get("details"):
        answer.completion_tokens = details.get("generated_tokens")
        answer.prompt_tokens = details.get("input_length")
    token = event.get("token")
    if token is None:
        return None
    return "" if token.get("special") else token.get("text") or ""


def _read_openai(event: dict[str, Any], answer: Answer) -> str | None:
    """The text of an event with output; one choice is expected."""
    if usage := event.get("usage"):
        answer.completion_tokens = usage.get("completion_tokens")
        answer.prompt_tokens = usage.get("prompt_tokens")
    for choice in event.get("choices") or ():
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            return str(text)
    return None
