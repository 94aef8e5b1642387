"""Bodies of /v1/completions into `GenerateRequest`s."""

from __future__ import annotations

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
from headrace_router.api.openai_types import CompletionBody
from headrace_router.limits import Limits
from headrace_router.service import Service
from headrace_router.text.pool import TooLong
from headrace_router.validation import COMPLETIONS, check_least, check_range, check_token_ids, too_long

MAX_LOGPROBS = 5
MAX_TOKENS = 16  # if a call does not say


async def prepare_completion(service: Service, body: CompletionBody, caller: Caller) -> Prepared:
    """Check a completions call and tokenize its prompts.

    Raises:
        InvalidRequest: a rule is broken.
    """
    limits = service.limits
    given = _prompts(body, limits)
    n, best_of = choices_of(body, limits)
    echo = bool(body.echo)
    max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    check_least("max_tokens", max_tokens, 0 if echo else 1)  # none at all: what is wanted is the prompt's scores
    check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    check_common(body)
    refuse_given(suffix=body.suffix)
    prompts = [await _encode(service, prompt, echo, body.logprobs is not None) for prompt in given]
    grammar = await openai_grammar(service, body)
    requests = make_requests(
        COMPLETIONS, service, caller, body, prompts, best_of, max(max_tokens, 1), grammar, body.logprobs or 0,
        body.logprobs if echo else None,
    )
    shown = shown_of(body, body.logprobs is not None, echo, max_tokens > 0)
    return Prepared(prompts, requests, n, best_of, shown)


async def _encode(service: Service, given: str | list[int], echo: bool, logprobs: bool) -> Prompt:
    text = service.text
    if not isinstance(given, str):
        return Prompt(await text.run(text.tokenizer.decode, given, False) if echo else "", given)
    given = text.normalize(given)
    try:
        ids = await text.encode(given, service.limits.max_input_tokens)
    except TooLong as error:
        raise too_long(COMPLETIONS, error.at_least, service.limits) from None
    if not (echo and logprobs):
        return Prompt(given, ids)
    pieces = await text.run(text.tokenizer.pieces, given)
    return Prompt(given, ids, [piece.start for piece in pieces])


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
            check_token_ids("prompt", prompt, limits)
    return prompts
