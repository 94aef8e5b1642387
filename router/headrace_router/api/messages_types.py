"""JSON shapes of Anthropic's messages (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from headrace_router.api.native_types import SomeOf
from headrace_router.api.tool_types import Name

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


# --- bodies ---


class TextIn(Struct, tag_field="type", tag="text"):
    text: str


class ToolUseIn(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultIn(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextIn] | None = None
    is_error: bool | None = None


class ThinkingIn(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedIn(Struct, tag_field="type", tag="redacted_thinking"):
    """Thoughts that only another server can read; they are left out."""

    data: str | None = None


BlockIn = TextIn | ToolUseIn | ToolResultIn | ThinkingIn | RedactedIn


class MessageIn(Struct):
    role: Literal["user", "assistant"]
    content: str | list[BlockIn]


class MessageTool(Struct):
    """A tool that the client runs."""

    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class MessageToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Struct):
    """Whether the model is to think; it has no budget of its own."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(Struct):
    """`format`: `{"type": "json_schema", "schema": …}`."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class CountBody(Struct, kw_only=True):
    """Body of /v1/messages/count_tokens."""

    messages: Annotated[list[MessageIn], SomeOf]
    model: str | None = None
    system: str | list[TextIn] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None


class MessageBody(CountBody, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: int
    metadata: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: int | None = None
    top_p: float | None = None
    service_tier: str | None = None  # without effect
    mcp_servers: Any = None  # refused
    container: Any = None  # refused
    thread: Any = None  # refused


# --- answers ---


class TextOut(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingOut(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseOut(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


BlockOut = TextOut | ThinkingOut | ToolUseOut


class MessageUsage(Struct):
    input_tokens: int  # that had to be computed
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageReply(Struct, kw_only=True, tag_field="type", tag="message"):
    """The answer of /v1/messages."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[BlockOut]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class Counted(Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


# --- events ---


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: MessageReply


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: BlockOut


class MessageTextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: MessageTextDelta | ThinkingDelta | InputDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Stopped(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: Stopped
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


AnyEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
encode = msgspec.json.Encoder().encode
decoder = msgspec.json.Decoder(MessageBody)
count_decoder = msgspec.json.Decoder(CountBody)
