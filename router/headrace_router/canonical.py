"""One form for what many APIs ask: values that change nothing are left out, and a request has one spelling in bytes.

`canonical` says of two requests whether they ask for the same output: prompt tokens and everything that bears on which
tokens, text and log probabilities come back, and nothing else (who asks, how urgently, how the answer is wrapped).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from headrace_router.types import GenerateRequest, Sampling

VERSION = 1  # of the layout; another one makes old bytes unequal to new ones

# what leaves the distribution as it is
_NEUTRAL: dict[str, float] = {
    "temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0,
}
_OF_DRAWS = ("seed", "temperature", "top_k", "top_p", "typical_p", "min_p")  # nothing is drawn without `do_sample`
_WHO = ("deadline", "min_tier", "tenant", "workload")
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def settle(sampling: Sampling, vocab_size: int) -> Sampling:
    """The same sampling with every value that changes nothing off, so that equal ones are equal objects."""
    off: dict[str, Any] = {name: None for name, value in _NEUTRAL.items() if getattr(sampling, name) == value}
    if sampling.top_k is not None and sampling.top_k >= vocab_size:
        off["top_k"] = None
    if not sampling.do_sample:
        off |= dict.fromkeys(_OF_DRAWS)
    if 0.0 in sampling.logit_bias.values():
        off["logit_bias"] = {token: bias for token, bias in sampling.logit_bias.items() if bias}
    return dataclasses.replace(sampling, **off) if off else sampling


def canonical(request: GenerateRequest) -> bytes:
    """The bytes of a request: equal if and only if the same output is asked for.

    A MessagePack map with sorted keys of the fields of `GenerateRequest` and of its `Sampling` that differ from their
    defaults, and the version; a field that comes later changes nothing for requests without it. Stop strings and stop
    tokens are sets. A seed that was drawn for the request is part of it: two such requests are never equal.
    """
    sampling = _set_fields(request.sampling)
    if "logit_bias" in sampling:
        sampling["logit_bias"] = sorted(request.sampling.logit_bias.items())
    made = {**_set_fields(request), "sampling": sampling, "version": VERSION}
    made["stop"], made["stop_token_ids"] = sorted(set(request.stop)), sorted(set(request.stop_token_ids))
    made["keep_stop"] = request.keep_stop and bool(request.stop or request.stop_token_ids)
    for name in _WHO:
        made.pop(name, None)
    return _encode(made)


def _set_fields(value: GenerateRequest | Sampling) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    made = {}
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is dataclasses.MISSING or given != default:
            made[field.name] = given
    return made
