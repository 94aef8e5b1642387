"""JSON shapes of OpenAI's chat completions and completions.

https://platform.openai.com/docs/api-reference/chat and .../completions. `top_k`, `min_p` and `repetition_penalty` are
common extensions.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace_router.api.grammars import GrammarFields


class StreamOptions(Struct):
    include_usage: bool | None = None


class TextPart(Struct):
    type: Literal["text"]
    text: str


class FunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None


class CommonBody(GrammarFields, kw_only=True):
    """What both routes take. Null means not given."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatBody(CommonBody, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None


class CompletionBody(CommonBody, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ChatTokenizeBody(Struct):
    """Body of /chat_tokenize."""

    messages: list[Message]


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class AssistantMessage(Struct):
    role: str
    content: str


class Delta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Reply(Struct):
    """The envelope of every answer and chunk."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage | UnsetType = UNSET


encode = msgspec.json.Encoder().encode
chat_decoder = msgspec.json.Decoder(ChatBody)
completion_decoder = msgspec.json.Decoder(CompletionBody)
chat_tokenize_decoder = msgspec.json.Decoder(ChatTokenizeBody)
