"""Bodies of /v1/chat/completions into `GenerateRequest`s."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace._common.errors import InvalidRequest
from headrace_router.api.bodies import refuse_given
from headrace_router.api.caller import Caller
from headrace_router.api.grammars import openai_grammar
from headrace_router.api.openai_requests import (
    Prepared,
    Prompt,
    check_common,
    choices_of,
    make_requests,
    shown_of,
)
from headrace_router.api.openai_types import ChatBody, Conversation, Message
from headrace_router.service import Service
from headrace_router.text import pool
from headrace_router.text.renderer import Turn
from headrace_router.validation import CHAT, Rules, check_least, check_range, too_long

MAX_TOP_LOGPROBS = 20
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
NEWER = Rules("max_completion_tokens", CHAT.inputs)


async def prepare_chat(service: Service, body: ChatBody, caller: Caller) -> Prepared:
    """Check a chat call and render and tokenize its conversation.

    Raises:
        InvalidRequest: a rule is broken.
        TemplateError: the model's template refuses the conversation, or there is none.
    """
    limits = service.limits
    rules, max_tokens = CHAT, body.max_tokens
    if body.max_completion_tokens is not None:
        rules, max_tokens = NEWER, body.max_completion_tokens
    check_least(rules.max_new_tokens, max_tokens, 1)
    n, best_of = choices_of(body, limits)
    check_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    _check_offered(body)
    prompt = await encode_chat(service, body, limits.max_input_tokens)
    prompts = [Prompt(prompt.text, prompt.ids)]
    grammar = await openai_grammar(service, body)
    requests = make_requests(
        rules, service, caller, body, prompts, best_of, max_tokens, grammar, body.top_logprobs or 0
    )
    return Prepared(prompts, requests, n, best_of, shown_of(body, bool(body.logprobs)))


def _check_offered(body: ChatBody) -> None:
    check_common(body)
    refuse_given(
        tools=body.tools, functions=body.functions, audio=body.audio, web_search_options=body.web_search_options,
        chat_template=body.chat_template, echo=body.echo, modalities=set(body.modalities or ()) - {"text"},
        tool_choice=body.tool_choice if body.tool_choice not in ("none", "auto") else None,
        function_call=body.function_call if body.function_call not in ("none", "auto") else None,
    )


async def encode_chat(service: Service, body: Conversation, most: int | None = None) -> pool.ChatPrompt:
    """The prompt of a conversation.

    Raises:
        InvalidRequest: the messages or what goes with them are wrong, or they have many more than `most` tokens.
        TemplateError: the model's template refuses the conversation, or there is none.
    """
    messages = _check_messages(body.messages)
    turn, variables = _turn(body, messages), _variables(service, body)
    try:
        return await service.text.chat(messages, most, turn, variables)
    except pool.TooLong as error:
        raise too_long(CHAT, error.at_least, service.limits) from None


def _check_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as plain values."""
    if not messages:
        raise InvalidRequest("`messages` must not be empty", "messages")
    for index, message in enumerate(messages):
        calls = message.role == "assistant" and message.tool_calls
        if message.content is None and not calls:
            raise InvalidRequest(f"messages[{index}] has no `content`", "messages")
    plain: list[dict[str, Any]] = msgspec.to_builtins(messages)
    return plain


def _turn(body: Conversation, messages: list[dict[str, Any]]) -> Turn | None:
    """How the prompt ends. An assistant's last message goes on, unless a flag says otherwise."""
    on, new = body.continue_final_message, body.add_generation_prompt
    if on and new:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` must not both be true", "continue_final_message"
        )
    if on and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
        raise InvalidRequest(
            "`continue_final_message` needs a last message of the assistant without tool calls", "continue_final_message"
        )
    if on:
        return "continue"
    if new is not None:
        return "new" if new else "none"
    return "new" if on is False else None


def _variables(service: Service, body: Conversation) -> dict[str, Any]:
    """More variables for the template."""
    made = dict(body.chat_template_kwargs or {})
    for name in RESERVED:
        if name in made:
            raise InvalidRequest(f"`chat_template_kwargs` must not hold `{name}`", "chat_template_kwargs")
    if body.reasoning_effort is not None:
        made.setdefault("reasoning_effort", body.reasoning_effort)
    if body.documents:
        if not service.text.mentions("documents"):
            raise InvalidRequest("`documents` is not supported: the model's chat template has no place for them", "documents")
        made["documents"] = body.documents
    return made
