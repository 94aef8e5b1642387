"""Conversations as templates want them, and prompts from what templates write.

What users write is data: a control token in a message is encoded as the plain text that it is, only the template's own
control tokens are control tokens. Noncharacters of Unicode mark the difference in the rendered text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from headrace._common.errors import InvalidRequest
from headrace._common.tokenizing import Tokenizer

_NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of OpenAI's messages for the template: text parts joined, null members dropped, tool arguments as objects.

    Raises:
        InvalidRequest: the arguments of a tool call are not JSON.
    """
    return [_template_message(message, index) for index, message in enumerate(messages)]


def _template_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if value is not None}
    if isinstance(made.get("content"), list):
        made["content"] = "".join(part["text"] for part in made["content"])
    elif "content" not in made:
        made["content"] = ""
    if "function_call" in made:
        made["function_call"] = _template_call({"function": made["function_call"]}, index)["function"]
    if "tool_calls" in made:
        made["tool_calls"] = [_template_call(call, index) for call in made["tool_calls"]]
    return made


def _template_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise InvalidRequest(
                f"the arguments of a tool call in messages[{index}] are not JSON", "messages"
            ) from None
    return {**call, "function": function}


class Marked:
    """A conversation whose control tokens, if users wrote any, stand between two marks."""

    def __init__(self, messages: list[dict[str, Any]], control: re.Pattern[str]) -> None:
        """`control` matches the text of any control token.

        Raises:
            InvalidRequest: the messages use up Unicode's noncharacters, so that none is left as a mark.
        """
        self.marks: tuple[str, str] | None = None
        texts: list[str] = []

        def collect(text: str) -> str:
            texts.append(text)
            return text

        _each_text(messages, collect)
        self.messages = messages
        if any(control.search(text) for text in texts):
            free = [c for c in _NONCHARACTERS if not any(c in text for text in texts)]
            if len(free) < 2:
                raise InvalidRequest("the messages hold too many different noncharacters", "messages")
            start, end = self.marks = free[0], free[1]
            self.messages = _each_text(messages, lambda text: control.sub(rf"{start}\g<0>{end}", text))

    def plain(self, rendered: str) -> str:
        """The rendered text without marks."""
        for mark in self.marks or ():
            rendered = rendered.replace(mark, "")
        return rendered

    def parts(self, rendered: str) -> list[tuple[str, bool]]:
        """The rendered text cut at the marks: (text, it is plain text of a user)."""
        if self.marks is None:
            return [(rendered, False)]
        start, end = self.marks
        parts, plain = [], False
        for piece in re.split(f"([{start}{end}])", rendered):
            if piece in (start, end):
                plain = piece == start
            elif piece:
                parts.append((piece, plain))
        return parts


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string that is not a key changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(item, change) for item in value]
    if isinstance(value, dict):
        return {key: item if key == "role" else _each_text(item, change) for key, item in value.items()}
    return value


class ChatEncoder:
    """Encodes rendered conversations; nothing is added to what the template wrote."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = sorted((tokenizer.text_of(i) for i in tokenizer.special_ids), key=len, reverse=True)
        self.control = re.compile("|".join(re.escape(text) for text in texts if text) or "(?!)")
        first = tokenizer.encode("a", add_special_tokens=False)
        self._adds_space = bool(first) and tokenizer.text_of(first[0]).startswith("\u2581")
        self._newline = tokenizer.encode("\n", add_special_tokens=False)

    def encode(self, parts: list[tuple[str, bool]]) -> list[int]:
        """Token ids of the parts of a rendered conversation."""
        ids: list[int] = []
        for index, (text, plain) in enumerate(parts):
            # a control token cut in two is none any more, and its halves encode to the same text
            for place, piece in enumerate([text[:1], text[1:]] if plain else [text]):
                ids += self._encode(piece, at_start=index == 0 and place == 0)
        return ids

    def _encode(self, text: str, at_start: bool) -> list[int]:
        if at_start or not self._adds_space:
            return self._tokenizer.encode(text, add_special_tokens=False)
        # SentencePiece writes a space before the start of a text: encode after a line break, then drop that
        ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        count = len(self._newline)
        if ids[:count] == self._newline:
            return ids[count:]
        return self._tokenizer.encode(text, add_special_tokens=False)
