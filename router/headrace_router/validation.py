"""The rules of requests, whatever API they come through, in TGI's order and words.

Values that only one API refuses (OpenAI takes temperature 0, TGI does not) are that API's business; see `Rules`.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from headrace._common.errors import InvalidRequest
from headrace_router.limits import Limits
from headrace_router.types import Sampling

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
LARGEST_FACTOR = 1e6  # of a temperature or a repetition penalty, as the shard has it


@dataclass(frozen=True)
class Rules:
    """What an API calls the fields that messages name."""

    max_new_tokens: str  # what the API calls these fields
    inputs: str


NATIVE = Rules("max_new_tokens", "inputs")
COMPLETIONS = Rules("max_tokens", "prompt")
CHAT = Rules("max_tokens", "messages")


def draw_seed() -> int:
    """A seed for a request that samples and names none."""
    return secrets.randbits(63)


def float32(field: str, value: float | None) -> float | None:
    """The value as the shard will see it; tiny ones become 0.

    Raises:
        InvalidRequest: it is too large for 32 bits.
    """
    if value is None:
        return None
    try:
        number: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        raise InvalidRequest(f"`{field}` must be a finite 32-bit number", field) from None
    return number


def check_positive(field: str, value: float | None) -> None:
    """
    Raises:
        InvalidRequest: the value is given, and not above 0.
    """
    if value is not None and not value > 0:
        raise InvalidRequest(f"`{field}` must be strictly positive", field)


def check_factor(field: str, value: float | None) -> None:
    """
    Raises:
        InvalidRequest: the value is given, and not above 0, or larger than a shard takes it.
    """
    check_positive(field, value)
    if value is not None and value > LARGEST_FACTOR:
        raise InvalidRequest(f"`{field}` must be <= {LARGEST_FACTOR:.0f}. Given: {value}", field)


def check_range(field: str, value: float | None, low: float, high: float) -> None:
    """
    Raises:
        InvalidRequest: the value is given, and not within [low, high].
    """
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"`{field}` must be >= {low} and <= {high}. Given: {value}", field)


def check_least(field: str, value: int | None, low: int) -> None:
    """
    Raises:
        InvalidRequest: the value is given, and less than `low`.
    """
    if value is not None and value < low:
        raise InvalidRequest(f"`{field}` must be >= {low}. Given: {value}", field)


def check_fraction(field: str, value: float | None, one: bool = False) -> None:
    """
    Raises:
        InvalidRequest: the value is given, and not within (0, 1), or (0, 1] if `one`.
    """
    if value is not None and not (0 < value < 1 or (one and value == 1)):
        given = f" and <= 1.0. Given: {value}" if one else " and < 1.0"  # TGI's text names no value
        raise InvalidRequest(f"`{field}` must be > 0.0{given}", field)


def check_stop(stop: Sequence[str], limits: Limits) -> None:
    """
    Raises:
        InvalidRequest: there are too many stop strings, or one is empty and would end every text at once.
    """
    if len(stop) > limits.max_stop_sequences:
        text = f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(stop)}"
        raise InvalidRequest(text, "stop")
    if "" in stop:
        raise InvalidRequest("`stop` must not contain an empty string", "stop")


def check_token_ids(field: str, ids: Sequence[int], limits: Limits) -> None:
    """
    Raises:
        InvalidRequest: one of the ids is not in the vocabulary.
    """
    for token_id in ids:
        if not 0 <= token_id < limits.vocab_size:
            text = f"`{field}`: token id {token_id} is not in the vocabulary of {limits.vocab_size} tokens"
            raise InvalidRequest(text, field)


def check_lengths(rules: Rules, length: int, max_new_tokens: int | None, limits: Limits) -> int:
    """The number of new tokens that a prompt of `length` tokens may get: as asked, or the rest of the window.

    Raises:
        InvalidRequest: the prompt is empty or too long, or asks for more than fits. Nothing is cut silently.
    """
    if length == 0:
        raise InvalidRequest(f"`{rules.inputs}` cannot be empty", rules.inputs)
    if max_new_tokens is not None and length + max_new_tokens > limits.max_total_tokens:
        raise InvalidRequest(
            f"`{rules.inputs}` tokens + `{rules.max_new_tokens}` must be <= {limits.max_total_tokens}. "
            f"Given: {length} `{rules.inputs}` tokens and {max_new_tokens} `{rules.max_new_tokens}`",
            rules.max_new_tokens if length <= limits.max_input_tokens else rules.inputs, CONTEXT_LENGTH_EXCEEDED,
        )
    if length > limits.max_input_tokens:
        raise InvalidRequest(
            f"`{rules.inputs}` must have less than {limits.max_input_tokens} tokens. Given: {length}",
            rules.inputs, CONTEXT_LENGTH_EXCEEDED,
        )
    return limits.max_total_tokens - length if max_new_tokens is None else max_new_tokens


def too_long(rules: Rules, at_least: int, limits: Limits) -> InvalidRequest:
    """The refusal of a prompt whose tokens were not all counted: there are more than `at_least`."""
    return InvalidRequest(
        f"`{rules.inputs}` must have less than {limits.max_input_tokens} tokens. Given: more than {at_least}",
        rules.inputs, CONTEXT_LENGTH_EXCEEDED,
    )


def check_logit_bias(given: dict[str, float] | None, limits: Limits) -> dict[int, float]:
    """OpenAI's logit_bias by token id.

    Raises:
        InvalidRequest: a key is not the id of a token, or a bias is not within [-100, 100].
    """
    bias = {}
    for key, value in (given or {}).items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= limits.vocab_size:
            text = f"`logit_bias` keys must be token ids below {limits.vocab_size}. Given: {key[:20]!r}"
            raise InvalidRequest(text, "logit_bias")
        check_range("logit_bias", value, -100, 100)
        bias[int(key)] = float32("logit_bias", value) or 0.0
    return bias


def check_native_sampling(given: Sampling) -> None:
    """TGI's rules of the native parameters, in its order.

    Raises:
        InvalidRequest: with TGI's text.
    """
    check_factor("temperature", given.temperature)
    check_factor("repetition_penalty", given.repetition_penalty)
    if given.frequency_penalty is not None and not -2 <= given.frequency_penalty <= 2:
        raise InvalidRequest("`frequency_penalty` must be >= -2.0 and <= 2.0", "frequency_penalty")
    check_fraction("top_p", given.top_p)
    check_fraction("typical_p", given.typical_p)
    check_positive("top_k", given.top_k)


def check_openai_sampling(given: Sampling) -> None:
    """OpenAI's bounds.

    Raises:
        InvalidRequest: names the parameter and its bounds.
    """
    check_range("temperature", given.temperature, 0.0, 2.0)
    check_fraction("top_p", given.top_p, one=True)
    check_fraction("typical_p", given.typical_p, one=True)
    check_range("min_p", given.min_p, 0.0, 1.0)
    check_range("frequency_penalty", given.frequency_penalty, -2.0, 2.0)
    check_range("presence_penalty", given.presence_penalty, -2.0, 2.0)
    check_factor("repetition_penalty", given.repetition_penalty)
