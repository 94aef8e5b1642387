"""Calls and tools of a conversation, as far as the model's template does not write them itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")  # what those templates insist on

INSTRUCTIONS = (
    "You may call one or more functions to help with the user's request. Their signatures are JSON objects, one a line, "
    "within <tools></tools>:\n<tools>\n{tools}\n</tools>\n\n"
    "To call a function, write a JSON object with its name and its arguments within <tool_call></tool_call>:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)


def adapt(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, mentions: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """The messages for a template: what it does not know is written into their contents, in Hermes' format.

    Args:
        messages: as `template_messages` makes them; they stay as they are.
        tools: in OpenAI's form.
        mentions: does the template hold this text?
    """
    made = _named([_without_functions(message) for message in messages])
    if mentions("[TOOL_CALLS]"):
        made = [_short_ids(message) for message in made]
    if not mentions("tool_calls"):
        made = [_calls_written(message) for message in made]
    if mentions("tool"):
        return made
    made = [_result_of_user(message) for message in made]
    return _instructed(made, tools) if tools else made


def _without_functions(message: dict[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's older form, with functions instead of tools, in the newer one."""
    made = dict(message)
    if made["role"] == "function":
        made["role"] = "tool"
    if (call := made.pop("function_call", None)) is not None:
        made["tool_calls"] = [{"id": "call_0", "type": "function", "function": call}]
    return made


def _named(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results get the name of the function that was called: some templates write it."""
    names: dict[str, str] = {}
    made: list[dict[str, Any]] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id", "")] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        made.append(message)
    return made


def _short_ids(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" in message:
        calls = [{**call, "id": _short(call.get("id", ""))} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    return {**message, "tool_call_id": _short(message["tool_call_id"])} if "tool_call_id" in message else message


def _short(call_id: str) -> str:
    return call_id if _MISTRAL_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _calls_written(message: dict[str, Any]) -> dict[str, Any]:
    made = dict(message)
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"].get("arguments") or {}}
        for call in made.pop("tool_calls", ())
    ]
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    if texts:
        made["content"] = "\n".join(filter(None, [_joined(made["content"]), *texts]))
    return made


def _result_of_user(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{_joined(message['content'])}\n</tool_response>"}


def _instructed(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools as a part of the system message."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = INSTRUCTIONS.format(tools=lines)
    if messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": f"{_joined(first['content'])}\n\n{text}".strip()}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _joined(content: str | list[dict[str, Any]]) -> str:
    """The text of a content."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
