"""The native API's bodies into `GenerateRequest`s, with TGI's rules in TGI's order."""

from __future__ import annotations

from dataclasses import dataclass

from headrace._common.errors import InvalidRequest
from headrace_router.api.bodies import refuse_given
from headrace_router.api.caller import Caller
from headrace_router.api.choices import check_count, spread
from headrace_router.api.grammars import native_grammar
from headrace_router.api.native_types import Parameters
from headrace_router.canonical import settle
from headrace_router.limits import Limits
from headrace_router.service import Service
from headrace_router.text.pool import TooLong
from headrace_router.types import GenerateRequest, Sampling
from headrace_router.validation import (
    NATIVE,
    check_lengths,
    check_native_sampling,
    check_stop,
    draw_seed,
    float32,
    too_long,
)


@dataclass(frozen=True)
class Prepared:
    """The requests of one prompt (several with `best_of`), and what their answer is to show."""

    requests: list[GenerateRequest]
    details: bool
    prompt_text: str  # "" unless the whole text is asked for


async def prepare(
    service: Service, inputs: str, parameters: Parameters | None, caller: Caller, stream: bool, full_text: bool
) -> Prepared:
    """Check parameters and tokenize a prompt.

    Raises:
        InvalidRequest: a rule is broken; the text is TGI's.
    """
    limits = service.limits
    given = parameters if parameters is not None else Parameters(do_sample=True)  # sampling is TGI's default
    sampling = _sampling(given)
    best_of = _best_of(given, sampling, stream, limits)
    if given.decoder_input_details and stream:
        raise InvalidRequest(
            "`decoder_input_details` == true is not supported when streaming tokens", "decoder_input_details"
        )
    check_native_sampling(sampling)
    if given.max_new_tokens == 0:
        raise InvalidRequest("`max_new_tokens` must be strictly positive", "max_new_tokens")
    check_count("best_of", best_of, service)
    stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
    check_stop(stop, limits)
    if given.seed is not None and given.seed >= 2**64:
        raise InvalidRequest(f"`seed` must be < {2**64}. Given: {given.seed}", "seed")
    top_n = given.top_n_tokens or 0
    if top_n > limits.max_top_n_tokens:
        text = f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {top_n}"
        raise InvalidRequest(text, "top_n_tokens")
    refuse_given(adapter_id=given.adapter_id)
    inputs = service.text.normalize(inputs)
    prompt = await _prompt(service, inputs, given.truncate)
    request = GenerateRequest(
        prompt=prompt, max_new_tokens=check_lengths(NATIVE, len(prompt), given.max_new_tokens, limits),
        sampling=settle(sampling, limits.vocab_size), stop=tuple(sorted(set(stop))), keep_stop=True, top_n_tokens=top_n,
        prompt_logprobs=bool(given.decoder_input_details), grammar=await native_grammar(service, given.grammar),
        tenant=caller.tenant, workload=caller.workload, deadline=caller.deadline,
        min_tier=caller.min_tier,
    )
    whole = full_text if given.return_full_text is None else given.return_full_text
    return Prepared(
        spread(request, best_of), details=bool(given.details or given.decoder_input_details),
        prompt_text=inputs if whole else "",
    )


def _sampling(given: Parameters) -> Sampling:
    do_sample = bool(given.do_sample) or any(
        value is not None for value in (given.temperature, given.top_k, given.top_p, given.typical_p)
    )
    seed = given.seed if given.seed is not None else draw_seed()
    return Sampling(
        do_sample=do_sample, seed=seed if do_sample else None, temperature=float32("temperature", given.temperature),
        top_k=given.top_k, top_p=float32("top_p", given.top_p), typical_p=float32("typical_p", given.typical_p),
        repetition_penalty=float32("repetition_penalty", given.repetition_penalty),
        frequency_penalty=float32("frequency_penalty", given.frequency_penalty), watermark=bool(given.watermark),
    )


def _best_of(given: Parameters, sampling: Sampling, stream: bool, limits: Limits) -> int:
    best_of = given.best_of if given.best_of is not None else 1
    if stream and best_of != 1:
        raise InvalidRequest("`best_of` != 1 is not supported when streaming tokens", "best_of")
    if best_of <= 1:
        return 1
    if limits.max_best_of == 1:
        raise InvalidRequest("`best_of` != 1 is not allowed for this endpoint", "best_of")
    if best_of > limits.max_best_of:
        raise InvalidRequest(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}", "best_of")
    if not sampling.do_sample:
        raise InvalidRequest("you must use sampling when `best_of` is > 1", "best_of")
    if given.seed is not None:
        raise InvalidRequest("`seed` must not be set when `best_of` > 1", "seed")
    return best_of


async def _prompt(service: Service, inputs: str, truncate: int | None) -> list[int]:
    """Token ids, the right-most `truncate` of them."""
    if not inputs:
        raise InvalidRequest("`inputs` cannot be empty", "inputs")
    limit = service.limits.max_input_tokens
    if truncate is not None and not 0 < truncate <= limit:
        text = f"`truncate` must be strictly positive and less than {limit}. Given: {truncate}"
        raise InvalidRequest(text, "truncate")
    if truncate is not None:
        return (await service.text.encode(inputs))[-truncate:]
    try:
        return await service.text.encode(inputs, limit)
    except TooLong as error:
        raise too_long(NATIVE, error.at_least, service.limits) from None
