"""What OpenAI's two routes have in common on the way from a body to `GenerateRequest`s."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from headrace._common.errors import InvalidRequest
from headrace._common.grammars import Grammar
from headrace_router.api.bodies import refuse_given
from headrace_router.api.caller import Caller
from headrace_router.api.choices import check_count, spread
from headrace_router.api.openai_types import CommonBody, Refused
from headrace_router.canonical import settle
from headrace_router.limits import Limits
from headrace_router.service import Service
from headrace_router.tenants import CLASSES
from headrace_router.types import GenerateRequest, Sampling
from headrace_router.validation import (
    Rules,
    check_lengths,
    check_logit_bias,
    check_openai_sampling,
    check_range,
    check_stop,
    check_token_ids,
    draw_seed,
    float32,
)

MAX_CHOICES = 128  # OpenAI's limit of `n`
TIERS = {"auto": "default", "scale": "default"}  # what serves these


@dataclass(frozen=True)
class Prompt:
    """One prompt of a call. `text` is what an answer that echoes it shows, `offsets` where in it each token begins."""

    text: str
    ids: list[int]
    offsets: list[int] | None = None


@dataclass(frozen=True)
class Shown:
    """What the answer is to show beside the text."""

    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool
    service_tier: str | None
    echo: bool = False
    output: bool = True  # False: the call asks for no token; one is made for the sake of the prompt's, and not shown


@dataclass(frozen=True)
class Prepared:
    """The requests of one call, `best_of` for each prompt, of which `n` are shown."""

    prompts: list[Prompt]
    requests: list[GenerateRequest]
    n: int
    best_of: int
    shown: Shown

    @property
    def characters(self) -> int:
        """Length of all prompts."""
        return sum(len(prompt.text) for prompt in self.prompts)


def check_common(body: CommonBody) -> None:
    """
    Raises:
        InvalidRequest: something that neither route offers is asked for.
    """
    refuse_given(**{field: getattr(body, field) for field in Refused.__annotations__})
    refuse_given(skip_special_tokens=body.skip_special_tokens is False)
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("`stream_options` is only allowed when `stream` is true", "stream_options")
    if options is not None and options.continuous_usage_stats:
        raise InvalidRequest("`stream_options.continuous_usage_stats` is not supported", "stream_options")


def shown_of(body: CommonBody, logprobs: bool, echo: bool = False, output: bool = True) -> Shown:
    """What is to be shown."""
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    tier = body.service_tier and TIERS.get(body.service_tier, body.service_tier)
    return Shown(bool(body.stream), usage, logprobs, bool(body.return_token_ids), tier, echo, output)


def sampling_of(body: CommonBody, limits: Limits) -> Sampling:
    """How tokens are chosen; a seed may still have to be drawn. Temperature 0 takes the most likely token, and OpenAI's
    default is to sample at 1.

    Raises:
        InvalidRequest: a value is out of its bounds.
    """
    numbers: dict[str, Any] = {
        name: float32(name, getattr(body, name)) for name in (
            "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
        )
    }
    if body.top_k is not None and not -1 <= body.top_k < 2**31:
        raise InvalidRequest(f"`top_k` must be >= -1 and < {2**31}. Given: {body.top_k}", "top_k")
    if body.seed is not None and not -(2**63) <= body.seed < 2**63:
        raise InvalidRequest(f"`seed` must be a signed 64-bit integer. Given: {body.seed}", "seed")
    given = Sampling(
        do_sample=numbers["temperature"] != 0, seed=None if body.seed is None else body.seed % 2**64,
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        logit_bias=check_logit_bias(body.logit_bias, limits), **numbers,
    )
    check_openai_sampling(given)
    return settle(given, limits.vocab_size)


def choices_of(body: CommonBody, limits: Limits) -> tuple[int, int]:
    """(choices shown of each prompt, choices made of each prompt).

    Raises:
        InvalidRequest: that many are not made, or cannot be streamed.
    """
    check_range("n", body.n, 1, MAX_CHOICES)
    n = body.n or 1
    if body.best_of is None or body.best_of == n:
        return n, n
    check_range("best_of", body.best_of, n, limits.max_best_of)
    if body.stream:
        raise InvalidRequest(f"`best_of` must equal `n` ({n}) when `stream` is true. Given: {body.best_of}", "best_of")
    return n, body.best_of


def workload_of(body: CommonBody, caller: Caller) -> str:
    """The workload class, of those that the caller may use: `service_tier` flex and a `priority` above 0 wait for others,
    `service_tier` priority and a `priority` below 0 (vLLM: lower comes first) do not; everything else leaves it to the
    caller's own.
    """
    allowed = [workload for workload in CLASSES if workload in caller.tenant.classes]
    if body.service_tier == "flex" or (body.priority or 0) > 0:
        return allowed[-1]
    if body.service_tier == "priority" or (body.priority or 0) < 0:
        return allowed[0]
    return caller.workload


def make_requests(
    rules: Rules, service: Service, caller: Caller, body: CommonBody, prompts: list[Prompt], best_of: int,
    max_tokens: int | None, grammar: Grammar | None, top_n: int = 0, prompt_top_n: int | None = None,
    shown_tokens: tuple[int, ...] = (),
) -> list[GenerateRequest]:
    """`best_of` requests for each prompt. `prompt_top_n`: alternatives beside each prompt token; None: do not score it.

    Raises:
        InvalidRequest: a rule is broken.
    """
    limits = service.limits
    check_count("n" if best_of > 1 else rules.inputs, best_of * len(prompts), service)
    sampling = sampling_of(body, limits)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    check_stop(stop, limits)
    stop_ids = body.stop_token_ids or []
    check_token_ids("stop_token_ids", stop_ids, limits)
    made: list[GenerateRequest] = []
    for prompt in prompts:
        length = check_lengths(rules, len(prompt.ids), max_tokens, limits)
        check_range("min_tokens", body.min_tokens, 0, length)
        drawn = sampling.do_sample and sampling.seed is None
        request = GenerateRequest(
            prompt=prompt.ids, max_new_tokens=length,
            sampling=dataclasses.replace(sampling, seed=draw_seed()) if drawn else sampling,
            stop=tuple(sorted(set(stop))), keep_stop=bool(body.include_stop_str_in_output),
            stop_token_ids=tuple(sorted(set(stop_ids))), min_new_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos), top_n_tokens=top_n, prompt_logprobs=prompt_top_n is not None,
            prompt_top_n_tokens=prompt_top_n or 0, grammar=grammar, tenant=caller.tenant, workload=workload_of(body, caller),
            deadline=caller.deadline, shown_tokens=shown_tokens, min_tier=caller.min_tier,
        )
        made += spread(request, best_of)
    return made
