"""Bodies of /v1/messages as bodies of a chat."""

from __future__ import annotations

from typing import Any

from headrace._common.errors import InvalidRequest
from headrace_router.api import messages_types as shapes
from headrace_router.api.bodies import refuse_given
from headrace_router.api.openai_types import ChatBody, Message, TextPart
from headrace_router.api.tool_types import FunctionCall, FunctionTool, Tool, ToolCall

NO_THREADS = "thread_unsupported_request"  # by which Anthropic's clients know that they have to send the whole history
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: shapes.MessageBody) -> ChatBody:
    """The chat that a body asks for.

    Raises:
        InvalidRequest: something is asked for that is not offered.
    """
    refuse_given(mcp_servers=body.mcp_servers, container=body.container)
    if body.thread:
        raise InvalidRequest("`thread` is not supported: send all messages", "thread", NO_THREADS)
    made = as_prompt(body)
    made.max_tokens, made.stop, made.stream = body.max_tokens, body.stop_sequences, body.stream
    made.temperature, made.top_p, made.top_k = body.temperature, body.top_p, body.top_k
    return made


def as_prompt(body: shapes.CountBody) -> ChatBody:
    """The part of it that makes the prompt.

    Raises:
        InvalidRequest: a tool is to be called, and it is not said which.
    """
    made = ChatBody(messages=[Message("system", _text(body.system))] if body.system else [])
    for message in body.messages:
        made.messages += _of_assistant(message) if message.role == "assistant" else _of_user(message)
    if body.tools is not None:
        made.tools = [Tool(FunctionTool(t.name, t.description, t.input_schema, strict=t.strict)) for t in body.tools]
    if body.tool_choice is not None:
        made.tool_choice = _choice(body.tool_choice)
        made.parallel_tool_calls = False if body.tool_choice.disable_parallel_tool_use else None
    if body.thinking is not None:
        made.chat_template_kwargs = {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config is not None:
        made.reasoning_effort = body.output_config.effort
        made.response_format = _format(body.output_config.format)
    return made


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """The format of the output as a chat has it."""
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise InvalidRequest("`output_config.format.type` must be json_schema", "output_config")
    return {"type": "json_schema", "json_schema": given}


def _choice(choice: shapes.MessageToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise InvalidRequest("`tool_choice` must name the tool", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _of_assistant(message: shapes.MessageIn) -> list[Message]:
    if isinstance(message.content, str):
        return [Message("assistant", message.content)]
    made = Message("assistant")
    texts = [TextPart("text", block.text) for block in message.content if isinstance(block, shapes.TextIn)]
    thoughts = [block.thinking for block in message.content if isinstance(block, shapes.ThinkingIn)]
    calls = [
        ToolCall(FunctionCall(block.name, block.input), block.id)
        for block in message.content if isinstance(block, shapes.ToolUseIn)
    ]
    made.content = texts if texts or not calls else None
    made.tool_calls, made.reasoning_content = calls or None, "".join(thoughts) or None
    return [made]


def _of_user(message: shapes.MessageIn) -> list[Message]:
    """Results are messages of their own, in the order of the blocks."""
    if isinstance(message.content, str):
        return [Message("user", message.content)]
    made: list[Message] = []
    for block in message.content:
        if isinstance(block, shapes.ToolResultIn):
            text = _text(block.content or "")
            if block.is_error:
                text = [TextPart("text", "Error: "), *([TextPart("text", text)] if isinstance(text, str) else text)]
            made.append(Message("tool", text, tool_call_id=block.tool_use_id))
        elif isinstance(block, shapes.TextIn):
            if not made or made[-1].role != "user":
                made.append(Message("user", []))
            assert isinstance(made[-1].content, list)
            made[-1].content.append(TextPart("text", block.text))
        else:
            raise InvalidRequest("a user's message holds a block that only an assistant's may", "messages")
    return made


def _text(content: str | list[shapes.TextIn]) -> str | list[TextPart]:
    return content if isinstance(content, str) else [TextPart("text", block.text) for block in content]
