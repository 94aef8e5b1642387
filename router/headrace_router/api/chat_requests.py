"""Bodies of /v1/chat/completions into `GenerateRequest`s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace._common.errors import InvalidRequest
from headrace._common.grammars import Grammar
from headrace_router.api.bodies import refuse_given
from headrace_router.api.caller import Caller
from headrace_router.api.grammars import checked, openai_grammar
from headrace_router.api.openai_requests import (
    Prepared,
    Prompt,
    check_common,
    choices_of,
    make_requests,
    shown_of,
)
from headrace_router.api.openai_types import ChatBody, Conversation, Message
from headrace_router.api.tool_grammars import calls_or_body, forced_calls, free_calls
from headrace_router.api.tool_types import FunctionTool
from headrace_router.api.tools import Reading, ToolUse, offered, plain_tools, tool_use
from headrace_router.service import Service
from headrace_router.text import pool
from headrace_router.text.renderer import Turn
from headrace_router.validation import CHAT, Rules, check_least, check_range, too_long

MAX_TOP_LOGPROBS = 20
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
NEWER = Rules("max_completion_tokens", CHAT.inputs)


@dataclass(frozen=True)
class PreparedChat(Prepared):
    """The requests of one chat, and how their outputs are read."""

    reading: Reading


async def prepare_chat(service: Service, body: ChatBody, caller: Caller, rules: Rules | None = None) -> PreparedChat:
    """Check a chat call and render and tokenize its conversation. `rules`: of another API that it came through.

    Raises:
        InvalidRequest: a rule is broken.
        TemplateError: the model's template refuses the conversation, or there is none.
    """
    limits = service.limits
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        rules, max_tokens = rules or NEWER, body.max_completion_tokens
    rules = rules or CHAT
    check_least(rules.max_new_tokens, max_tokens, 1)
    n, best_of = choices_of(body, limits)
    check_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    _check_offered(body)
    use = tool_use(body)
    rendered = await encode_chat(service, body, limits.max_input_tokens, use.functions if use is not None else ())
    prompt = Prompt(rendered.text, rendered.ids)
    marker = _marker(service) if use is not None else None
    marked = marker is not None and use is not None and use.forced
    if marker is not None and marked:
        prompt = Prompt(prompt.text + service.text.tokenizer.text_of(marker), [*prompt.ids, marker])
    grammar = await openai_grammar(service, body)
    constrained = grammar is not None or (use is not None and use.forced)
    if use is not None:
        grammar = await _with_calls(service, body, use, grammar, marker)
    reading = Reading.after(service.text, prompt.text, use, constrained, marked)
    requests = make_requests(
        rules, service, caller, body, [prompt], best_of, max_tokens, grammar, body.top_logprobs or 0,
        shown_tokens=reading.markers,
    )
    return PreparedChat([prompt], requests, n, best_of, shown_of(body, bool(body.logprobs)), reading)


def _marker(service: Service) -> int | None:
    """The special token before calls, of formats that have one; the prompt ends with it where the model has to call."""
    if service.text.tools.name != "mistral":
        return None
    found = service.text.tokenizer.id_of("[TOOL_CALLS]")
    return found if found in service.text.tokenizer.special_ids else None


async def _with_calls(
    service: Service, body: ChatBody, use: ToolUse, grammar: Grammar | None, marker: int | None
) -> Grammar | None:
    """The grammar of an output that may hold calls. It is checked with the marker's text in the place of its token: the checker
    knows bytes, not the model's tokens.

    Raises:
        InvalidRequest: the two cannot be had together, or a schema cannot be enforced.
    """
    name = service.text.tools.name
    if use.forced:
        if grammar is not None and body.response_format is None:
            raise InvalidRequest("a grammar and a function that must be called exclude each other", "tool_choice")
        return await checked(service, forced_calls(name, use, marker is not None), "tools")
    if grammar is not None:
        await checked(service, calls_or_body(name, use, grammar), "tools")
        return calls_or_body(name, use, grammar, marker)
    if not use.strict:
        return None
    await checked(service, free_calls(name, use), "tools")
    return free_calls(name, use, marker)


def _check_offered(body: ChatBody) -> None:
    check_common(body)
    refuse_given(
        audio=body.audio, web_search_options=body.web_search_options, chat_template=body.chat_template, echo=body.echo,
        modalities=set(body.modalities or ()) - {"text"},
    )


async def encode_chat(
    service: Service, body: Conversation, most: int | None = None, functions: tuple[FunctionTool, ...] | None = None
) -> pool.ChatPrompt:
    """The prompt of a conversation. `functions`: that the model may call; None: those of the body.

    Raises:
        InvalidRequest: the messages or what goes with them are wrong, or they have many more than `most` tokens.
        TemplateError: the model's template refuses the conversation, or there is none.
    """
    messages = _check_messages(body.messages)
    turn, variables = _turn(body, messages), _variables(service, body)
    if functions := offered(body.tools) if functions is None else functions:
        variables["tools"] = plain_tools(functions)
        if isinstance(body, ChatBody) and body.tool_prompt:
            messages = _with_prompt(messages, body.tool_prompt)
    try:
        return await service.text.chat(messages, most, turn, variables, complete=True)
    except pool.TooLong as error:
        raise too_long(CHAT, error.at_least, service.limits) from None


def _with_prompt(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with a text after the last one."""
    *others, last = messages
    content = last["content"] or ""
    more = [*content, {"type": "text", "text": f"\n{text}"}] if isinstance(content, list) else f"{content}\n{text}"
    return [*others, {**last, "content": more}]


def _check_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as plain values."""
    if not messages:
        raise InvalidRequest("`messages` must not be empty", "messages")
    for index, message in enumerate(messages):
        calls = message.role == "assistant" and (message.tool_calls or message.function_call)
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
