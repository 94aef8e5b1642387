"""OpenAI's bodies into `GenerateRequest`s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace._common.errors import InvalidRequest
from headrace_router.api.bodies import refuse_given
from headrace_router.api.caller import Caller
from headrace_router.api.openai_types import ChatBody, CommonBody, CompletionBody, Message
from headrace_router.limits import Limits
from headrace_router.service import Service
from headrace_router.text.pool import TooLong
from headrace_router.types import GenerateRequest, Sampling
from headrace_router.validation import (
    CHAT,
    COMPLETIONS,
    Rules,
    check_lengths,
    check_logit_bias,
    check_openai_sampling,
    check_prompt_ids,
    check_range,
    check_stop,
    draw_seed,
    float32,
    too_long,
)

MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True)
class Shown:
    """What the answer is to show beside the text."""

    stream: bool
    include_usage: bool
    logprobs: bool


@dataclass(frozen=True)
class Prepared:
    """The requests of one call, one for each choice."""

    requests: list[GenerateRequest]
    characters: int  # of all prompts
    shown: Shown


def _shown(body: CommonBody, logprobs: bool) -> Shown:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` is only allowed when `stream` is true", "stream_options")
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Shown(bool(body.stream), usage, logprobs)


def _sampling(body: CommonBody, limits: Limits) -> Sampling:
    """Temperature 0 takes the most likely token; OpenAI's default is to sample at 1."""
    temperature = float32("temperature", body.temperature)
    penalty = float32("repetition_penalty", body.repetition_penalty)
    top_p, min_p = float32("top_p", body.top_p), float32("min_p", body.min_p)
    given = Sampling(
        temperature=temperature, top_p=top_p, repetition_penalty=penalty,
        frequency_penalty=body.frequency_penalty or None, presence_penalty=body.presence_penalty or None,
        logit_bias=check_logit_bias(body.logit_bias, limits),
    )
    check_openai_sampling(given)
    check_range("min_p", min_p, 0.0, 1.0)
    if body.top_k is not None and not -1 <= body.top_k < 2**31:
        raise InvalidRequest("`top_k` must be >= -1", "top_k")
    if body.seed is not None and not -(2**63) <= body.seed < 2**63:
        raise InvalidRequest("`seed` must be a signed 64-bit integer", "seed")
    do_sample = temperature is None or temperature > 0
    if not do_sample:
        return Sampling(
            repetition_penalty=penalty, frequency_penalty=given.frequency_penalty,
            presence_penalty=given.presence_penalty, logit_bias=given.logit_bias,
        )
    return Sampling(
        do_sample=True, seed=draw_seed() if body.seed is None else body.seed % 2**64, temperature=temperature,
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        top_p=None if top_p == 1 else top_p, min_p=min_p or None, repetition_penalty=penalty,
        frequency_penalty=given.frequency_penalty, presence_penalty=given.presence_penalty,
        logit_bias=given.logit_bias,
    )


def _stop(body: CommonBody, limits: Limits) -> tuple[str, ...]:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    check_stop(stop, limits)
    return tuple(stop)


def _check_choices(field: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InvalidRequest(f"`{field}` must be at least 1", field)
    if value is not None and value > 1:
        raise InvalidRequest(f"`{field}` > 1 is not supported", field)


def _check_max_tokens(value: int | None) -> None:
    if value is not None and value < 1:
        raise InvalidRequest("`max_tokens` must be at least 1", "max_tokens")


def _request(
    rules: Rules, service: Service, prompt: list[int], max_tokens: int | None, sampling: Sampling,
    stop: tuple[str, ...], top_n: int, caller: Caller,
) -> GenerateRequest:
    return GenerateRequest(
        prompt=prompt, max_new_tokens=check_lengths(rules, len(prompt), max_tokens, service.limits),
        sampling=sampling, stop=stop, keep_stop=False, top_n_tokens=top_n, tenant=caller.tenant,
        workload=caller.workload, deadline=caller.deadline,
    )


def check_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as plain values.

    Raises:
        InvalidRequest: there is none, or one has neither content nor anything in place of it.
    """
    if not messages:
        raise InvalidRequest("`messages` must not be empty", "messages")
    for index, message in enumerate(messages):
        calls = message.role == "assistant" and message.tool_calls
        if message.content is None and not calls:
            raise InvalidRequest(f"messages[{index}] has no `content`", "messages")
    plain: list[dict[str, Any]] = msgspec.to_builtins(messages)
    return plain


async def prepare_chat(service: Service, body: ChatBody, caller: Caller) -> Prepared:
    """Check a chat call and render and tokenize its conversation.

    Raises:
        InvalidRequest: a rule is broken.
        TemplateError: the model's template refuses the conversation, or there is none.
    """
    limits = service.limits
    messages = check_messages(body.messages)
    _check_choices("n", body.n)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    _check_max_tokens(max_tokens)
    top_n = body.top_logprobs or 0
    if not 0 <= top_n <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"`top_logprobs` must be >= 0 and <= {MAX_TOP_LOGPROBS}", "top_logprobs")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    shown = _shown(body, bool(body.logprobs))
    sampling, stop = _sampling(body, limits), _stop(body, limits)
    refuse_given(
        tools=body.tools, functions=body.functions,
        tool_choice=body.tool_choice if body.tool_choice not in ("none", "auto") else None,
        function_call=body.function_call if body.function_call not in ("none", "auto") else None,
    )
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise InvalidRequest("`response_format` is not supported, except for the type `text`", "response_format")
    try:
        prompt = await service.text.chat(messages, limits.max_input_tokens)
    except TooLong as error:
        raise too_long(CHAT, error.at_least, limits) from None
    request = _request(CHAT, service, prompt.ids, max_tokens, sampling, stop, top_n, caller)
    return Prepared([request], len(prompt.text), shown)


async def prepare_completion(service: Service, body: CompletionBody, caller: Caller) -> Prepared:
    """Check a completions call and tokenize its prompts.

    Raises:
        InvalidRequest: a rule is broken.
    """
    limits = service.limits
    prompts = _prompts(body, limits)
    _check_choices("n", body.n)
    _check_choices("best_of", body.best_of)
    _check_max_tokens(body.max_tokens)
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_COMPLETION_LOGPROBS:
        raise InvalidRequest(f"`logprobs` must be >= 0 and <= {MAX_COMPLETION_LOGPROBS}", "logprobs")
    shown = _shown(body, body.logprobs is not None)
    sampling, stop = _sampling(body, limits), _stop(body, limits)
    refuse_given(echo=body.echo, suffix=body.suffix)
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    requests = []
    for prompt in prompts:
        ids = await _encode(service, prompt) if isinstance(prompt, str) else prompt
        requests.append(_request(COMPLETIONS, service, ids, max_tokens, sampling, stop, body.logprobs or 0, caller))
    return Prepared(requests, sum(len(p) for p in prompts if isinstance(p, str)), shown)


async def _encode(service: Service, prompt: str) -> list[int]:
    try:
        return await service.text.encode(prompt, service.limits.max_input_tokens)
    except TooLong as error:
        raise too_long(COMPLETIONS, error.at_least, service.limits) from None


def _prompts(body: CompletionBody, limits: Limits) -> list[str | list[int]]:
    """The prompts of a call: text, or token ids."""
    given = body.prompt
    prompts: list[str | list[int]]
    if isinstance(given, str):
        prompts = [given]
    elif given and all(isinstance(item, int) for item in given):
        prompts = [[item for item in given if isinstance(item, int)]]
    elif any(isinstance(item, int) for item in given):
        raise InvalidRequest("`prompt` mixes token ids with prompts", "prompt")
    else:
        prompts = [item for item in given if not isinstance(item, int)]
    if not prompts:
        raise InvalidRequest("`prompt` cannot be empty", "prompt")
    if len(prompts) > limits.max_client_batch_size:
        text = f"`prompt` supports up to {limits.max_client_batch_size} prompts. Given: {len(prompts)}"
        raise InvalidRequest(text, "prompt")
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("`prompt` cannot be empty", "prompt")
        if not isinstance(prompt, str):
            check_prompt_ids(COMPLETIONS, prompt, limits)
    return prompts
