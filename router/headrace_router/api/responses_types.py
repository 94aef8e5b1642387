"""JSON shapes of OpenAI's responses (https://platform.openai.com/docs/api-reference/responses), the stateless part."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from headrace_router.api.tool_types import Name

Status = Literal["in_progress", "completed", "incomplete", "failed"]


# --- bodies ---


class ResponseTool(Struct):
    """A function that the model may call."""

    name: Name
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct):
    """`format`: text, json_object or json_schema."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None  # without effect


class ReasoningOptions(Struct):
    effort: str | None = None
    summary: str | None = None  # without effect: thoughts are shown as they are


class ResponseBody(Struct, kw_only=True):
    """Body of /v1/responses. Null means not given."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    store: bool | None = None  # without effect: nothing is stored
    service_tier: str | None = None
    truncation: str | None = None  # only disabled
    previous_response_id: Any = None  # refused, as all below
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    top_logprobs: int | None = None


class TextPart(Struct):
    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]


class CallItem(Struct):
    call_id: str
    name: str
    arguments: str


class ResultItem(Struct):
    call_id: str
    output: str | list[TextPart]


class ReasoningPart(Struct):
    text: str


class ReasoningItem(Struct):
    content: list[ReasoningPart] | None = None


# --- answers ---


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = []


class OutputCall(Struct, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall
OutputPart = OutputText | ReasoningText


class InputDetails(Struct):
    cached_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    code: str
    message: str


class Response(Struct, kw_only=True):
    """The answer of /v1/responses, which repeats what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningOptions
    store: bool = False
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[ResponseTool]
    top_p: float
    truncation: str = "disabled"
    user: str | None


# --- events ---


class Event(Struct, kw_only=True, tag_field="type"):
    """What every event of a stream has."""

    sequence_number: int = 0


class Created(Event, tag="response.created", kw_only=True):
    response: Response


class InProgress(Event, tag="response.in_progress", kw_only=True):
    response: Response


class Completed(Event, tag="response.completed", kw_only=True):
    response: Response


class Incompleted(Event, tag="response.incomplete", kw_only=True):
    response: Response


class Failed(Event, tag="response.failed", kw_only=True):
    response: Response


class ItemAdded(Event, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: OutputItem


class ItemDone(Event, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: OutputItem


class OfItem(Event, kw_only=True):
    """An event within an item."""

    item_id: str
    output_index: int


class OfPart(OfItem, kw_only=True):
    """An event within the one part of an item."""

    content_index: int = 0


class PartAdded(OfPart, tag="response.content_part.added", kw_only=True):
    part: OutputPart


class PartDone(OfPart, tag="response.content_part.done", kw_only=True):
    part: OutputPart


class TextDelta(OfPart, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[Any] = []


class TextDone(OfPart, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[Any] = []


class ReasoningDelta(OfPart, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(OfPart, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ArgumentsDelta(OfItem, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(OfItem, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


AnyEvent = (
    Created | InProgress | Completed | Incompleted | Failed | ItemAdded | ItemDone | PartAdded | PartDone | TextDelta | TextDone
    | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone
)
encode = msgspec.json.Encoder().encode
decoder = msgspec.json.Decoder(ResponseBody)
