"""JSON shapes of OpenAI's chat completions and completions.

https://platform.openai.com/docs/api-reference/chat and .../completions. What vLLM's clients send besides has vLLM's names
and meanings (https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace_router.api.grammars import GrammarFields
from headrace_router.api.native_types import NotEmpty, SomeOf
from headrace_router.api.tool_types import (
    FunctionCall,
    FunctionCalled,
    FunctionDelta,
    FunctionTool,
    Tool,
    ToolCall,
    ToolCalled,
    ToolDelta,
)


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # refused


class TextPart(Struct):
    type: Literal["text"]
    text: str


class Message(Struct):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None


ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class Refused(GrammarFields, kw_only=True):
    """Parameters that would change the output, and that this server does not offer: it refuses what it cannot honour.

    Every other member that is not known is ignored, since clients add some with every release.
    """

    use_beam_search: Any = None
    early_stopping: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    return_tokens_as_token_ids: Any = None
    cache_salt: Any = None


class CommonBody(Refused, kw_only=True):
    """What both routes take. Null means not given."""

    model: str | None = None
    user: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None  # only true
    return_token_ids: bool | None = None
    priority: int | None = None
    service_tier: ServiceTier | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Conversation(Protocol):
    """Messages, and how they become a prompt."""

    messages: list[Message]
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: str | None
    documents: list[dict[str, Any]] | None
    tools: list[Tool] | None


class ChatPrompt(Struct, kw_only=True):
    """A conversation by itself: body of /chat_tokenize."""

    messages: Annotated[list[Message], SomeOf]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None


class ChatBody(CommonBody, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], SomeOf]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tool_prompt: str | None = None  # TGI's: comes after the last message
    functions: list[FunctionTool] | None = None
    function_call: str | dict[str, Any] | None = None
    echo: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None


class CompletionBody(CommonBody, kw_only=True):
    """Body of /v1/completions."""

    prompt: Annotated[str, NotEmpty] | Annotated[list[str | int | list[int]], SomeOf]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class PromptDetails(Struct):
    cached_tokens: int  # of the prompt; they needed no computation


class CompletionDetails(Struct):
    """`reasoning_tokens`: of a model whose thoughts are told from its answer. The others: tokens that were guessed ahead
    (--speculate), and proved right or wrong; the shard does not tell them of an output that a stop string ends."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct):
    """A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


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
    """Columns with an entry for each token; those of a prompt's first token, which nothing predicts, are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]  # characters of the choice's text before the token


class AssistantMessage(Struct):
    role: str
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCalled] | UnsetType = UNSET
    function_call: FunctionCalled | UnsetType = UNSET


class Delta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolDelta] | None = None
    function_call: FunctionDelta | None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Envelope(Struct, kw_only=True):
    """What every answer and chunk has."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # of a chat


class ChatReply(Envelope, kw_only=True):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(Envelope, kw_only=True):
    """A chunk of its stream. `usage` is null but in the last chunk, and absent if it is not asked for."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionReply(Envelope, kw_only=True):
    """The answer of /v1/completions."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Envelope, kw_only=True):
    """A chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


encode = msgspec.json.Encoder().encode
chat_decoder = msgspec.json.Decoder(ChatBody)
completion_decoder = msgspec.json.Decoder(CompletionBody)
