"""Bodies of /v1/responses as bodies of a chat."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from headrace._common.errors import InvalidRequest
from headrace_router.api import responses_types as shapes
from headrace_router.api.bodies import refuse_given
from headrace_router.api.openai_types import ChatBody, Message, TextPart
from headrace_router.api.tool_types import FunctionCall, FunctionTool, Tool, ToolCall

T = TypeVar("T")

TIERS = ("auto", "default", "flex", "scale", "priority")


def as_chat(body: shapes.ResponseBody) -> ChatBody:
    """The chat that a body asks for.

    Raises:
        InvalidRequest: an item is of no known shape, or something is asked for that is not offered.
    """
    refuse_given(
        previous_response_id=body.previous_response_id, conversation=body.conversation, background=body.background,
        prompt=body.prompt, max_tool_calls=body.max_tool_calls, top_logprobs=body.top_logprobs,
        truncation=body.truncation if body.truncation != "disabled" else None,
    )
    if body.service_tier not in (None, *TIERS):
        raise InvalidRequest(f"`service_tier` must be one of {', '.join(TIERS)}", "service_tier")
    return ChatBody(
        messages=_messages(body), model=body.model, user=body.user, temperature=body.temperature, top_p=body.top_p,
        max_completion_tokens=body.max_output_tokens, stream=body.stream, response_format=_format(body.text),
        tools=None if body.tools is None else [
            Tool(FunctionTool(t.name, t.description, t.parameters, strict=t.strict)) for t in body.tools
        ],
        tool_choice=body.tool_choice, parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        service_tier=body.service_tier,  # type: ignore[arg-type]
    )


def _format(text: shapes.TextOptions | None) -> dict[str, Any] | None:
    """The format of the output as a chat has it."""
    if text is None or text.format is None:
        return None
    kind = text.format.get("type")
    if kind == "json_schema":
        return {"type": kind, "json_schema": text.format}
    if kind not in ("text", "json_object"):
        raise InvalidRequest("`text.format.type` must be text, json_object or json_schema", "text")
    return text.format


def _messages(body: shapes.ResponseBody) -> list[Message]:
    made = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*made, Message("user", body.input)]
    for place, item in enumerate(body.input):
        _add(made, item, place)
    return made


def _add(messages: list[Message], item: dict[str, Any], place: int) -> None:
    """One item of the input: a message of its own, or a part of the assistant's last one."""
    kind = item.get("type", "message")
    if kind == "message":
        message = _convert(item, shapes.MessageItem, place)
        if message.role == "assistant" and _is_open(messages) and messages[-1].content is None:
            messages[-1].content = _text(message.content)
        else:
            messages.append(Message(message.role, _text(message.content)))
    elif kind == "function_call":
        call = _convert(item, shapes.CallItem, place)
        _assistant(messages).tool_calls = [
            *(messages[-1].tool_calls or ()), ToolCall(FunctionCall(call.name, call.arguments), call.call_id)
        ]
    elif kind == "function_call_output":
        result = _convert(item, shapes.ResultItem, place)
        messages.append(Message("tool", _text(result.output), tool_call_id=result.call_id))
    elif kind == "reasoning":
        thoughts = _convert(item, shapes.ReasoningItem, place).content or []
        messages.append(Message("assistant", None, reasoning_content="".join(part.text for part in thoughts)))
    else:
        raise InvalidRequest(f"`input[{place}]` of the type {kind!r} is not supported", "input")


def _is_open(messages: list[Message]) -> bool:
    return bool(messages) and messages[-1].role == "assistant"


def _assistant(messages: list[Message]) -> Message:
    """The assistant's message at the end, a new one if somebody else spoke last."""
    if not _is_open(messages):
        messages.append(Message("assistant", None))
    return messages[-1]


def _text(content: str | list[shapes.TextPart]) -> str | list[TextPart]:
    return content if isinstance(content, str) else [TextPart("text", part.text) for part in content]


def _convert(item: dict[str, Any], kind: type[T], place: int) -> T:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`input[{place}]` is not valid: {error}", "input") from None
