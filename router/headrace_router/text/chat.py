"""Conversations as templates want them, and prompts from what templates write.

What users write is data: a control token in a message is encoded as the plain text that it is, only the template's own
control tokens are control tokens. Noncharacters of Unicode mark the difference in the rendered text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from headrace._common.errors import InvalidRequest, TemplateError
from headrace._common.tokenizing import Tokenizer

_NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]


_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same; templates read the first two


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of OpenAI's messages for the template: null members dropped, tool arguments as objects, reasoning under the
    names that transformers gives it.

    Raises:
        InvalidRequest: the arguments of a tool call are not JSON.
    """
    return [_template_message(message, index) for index, message in enumerate(messages)]


def _template_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if value is not None}
    made.setdefault("content", "")  # many templates add it to other text, also beside tool calls
    reasoning = next((made[name] for name in _REASONING if name in made), None)
    if reasoning is not None:
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
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


class Marks:
    """Characters that no text of a conversation holds. Two of them stand around control tokens that users wrote, one
    behind the text where the conversation is to go on.
    """

    def __init__(self, values: list[Any], control: re.Pattern[str]) -> None:
        """`values`: everything that comes from users, as JSON; `control` matches the text of any control token.

        Raises:
            InvalidRequest: they use up Unicode's noncharacters, so that too few are left.
        """
        texts: list[str] = []

        def collect(text: str) -> str:
            texts.append(text)
            return text

        _each_text(values, collect)
        self._needed = any(control.search(text) for text in texts)
        free = [c for c in _NONCHARACTERS if not any(c in text for text in texts)]
        if len(free) < 3:
            raise InvalidRequest("the messages hold too many different noncharacters", "messages")
        self._start, self._end, self._cut = free[:3]

    def mark(self, value: Any, control: re.Pattern[str]) -> Any:
        """A JSON value with marks around every control token in it, but in a role; a copy if there are any."""
        if not self._needed:
            return value
        around = rf"{self._start}\g<0>{self._end}"
        return _each_text(value, lambda text: control.sub(around, text))

    def cut_behind(self, content: Any) -> Any:
        """The content, a text or a list of parts, with a mark behind its text and a space that shows if it is stripped.

        Raises:
            TemplateError: there is no text.
        """
        if isinstance(content, str):
            return f"{content}{self._cut} "
        for at in reversed(range(len(content))):
            if "text" in (part := content[at]):
                return [*content[:at], {**part, "text": f"{part['text']}{self._cut} "}, *content[at + 1 :]]
        raise TemplateError("Template error: the last assistant message has no text to go on from")

    def cut(self, rendered: str) -> str:
        """The rendered text up to the mark, as transformers' `continue_final_message` cuts it.

        Raises:
            TemplateError: the template does not write the last message's content as it is.
        """
        at = rendered.rfind(self._cut)
        if at < 0:
            raise TemplateError("Template error: the chat template does not write the last assistant message as it is")
        return rendered[:at] if rendered.startswith(f"{self._cut} ", at) else rendered[:at].rstrip()

    def parts(self, rendered: str, control: re.Pattern[str]) -> list[tuple[str, bool]]:
        """The rendered text cut at the marks: (text, it is a control token that a user wrote).

        A template may have cut a marked token in two: marks that stand alone are dropped.
        """
        if not self._needed:
            return [(rendered, False)]
        pieces = re.split(f"{self._start}({control.pattern}){self._end}|[{self._start}{self._end}]", rendered)
        return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]


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
        first = tokenizer.encode("a", add_special_tokens=False)
        self._adds_space = bool(first) and tokenizer.text_of(first[0]).startswith("\u2581")
        self._newline = tokenizer.encode("\n", add_special_tokens=False)

    def encode(self, parts: list[tuple[str, bool]]) -> list[int]:
        """Token ids of the parts of a rendered conversation."""
        ids: list[int] = []
        for index, (text, plain) in enumerate(parts):
            for place, piece in enumerate(self._halves(text) if plain else [text]):
                ids += self._encode(piece, at_start=index == 0 and place == 0)
        return ids

    def _halves(self, text: str) -> list[str]:
        """A control token cut until none is left in the pieces; they encode to the same text."""
        pieces = []
        while any(added in text for added in self._tokenizer.added_texts) and len(text) > 1:
            pieces.append(text[:1])
            text = text[1:]
        return [*pieces, text]

    def _encode(self, text: str, at_start: bool) -> list[int]:
        if at_start or not self._adds_space:
            return self._tokenizer.encode(text, add_special_tokens=False)
        # SentencePiece writes a space before the start of a text: encode after a line break, then drop that
        ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        count = len(self._newline)
        if ids[:count] == self._newline:
            return ids[count:]
        return self._tokenizer.encode(text, add_special_tokens=False)
