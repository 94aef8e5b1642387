"""Rules and words of requests."""

from __future__ import annotations

import pytest

from headrace._common.errors import InvalidRequest, StartupError
from headrace.v1 import generation_pb2 as pb
from headrace_router import validation as v
from headrace_router.limits import Limits, find_limits
from headrace_router.settings import RouterSettings
from headrace_router.types import Sampling

LIMITS = Limits(512, 1024, 8, 100, 2, 4, 5, 4)


@pytest.mark.parametrize(("given", "text"), [
    (Sampling(temperature=0.0), "`temperature` must be strictly positive"),
    (Sampling(repetition_penalty=-1.0), "`repetition_penalty` must be strictly positive"),
    (Sampling(frequency_penalty=2.1), "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    (Sampling(top_p=1.0), "`top_p` must be > 0.0 and < 1.0"),
    (Sampling(top_p=0.0), "`top_p` must be > 0.0 and < 1.0"),
    (Sampling(typical_p=1.0), "`typical_p` must be > 0.0 and < 1.0"),
    (Sampling(top_k=-1), "`top_k` must be strictly positive"),
    (Sampling(temperature=float("nan")), "`temperature` must be strictly positive"),
    (Sampling(temperature=2e6), "`temperature` must be <= 1000000. Given: 2000000.0"),
    (Sampling(repetition_penalty=2e6), "`repetition_penalty` must be <= 1000000. Given: 2000000.0"),
])
def test_native_sampling(given: Sampling, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        v.check_native_sampling(given)
    assert str(caught.value) == text


@pytest.mark.parametrize(("given", "field"), [
    (Sampling(temperature=2.01), "temperature"), (Sampling(temperature=-0.1), "temperature"),
    (Sampling(top_p=0.0), "top_p"), (Sampling(top_p=1.5), "top_p"),
    (Sampling(repetition_penalty=2e6), "repetition_penalty"),
    (Sampling(presence_penalty=-2.5), "presence_penalty"), (Sampling(frequency_penalty=3.0), "frequency_penalty"),
])
def test_openai_sampling(given: Sampling, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        v.check_openai_sampling(given)
    assert caught.value.field == field


def test_openai_takes_its_edges() -> None:
    v.check_openai_sampling(Sampling(temperature=0.0, top_p=1.0, presence_penalty=2.0, frequency_penalty=-2.0))


def test_numbers_that_do_not_fit_32_bits() -> None:
    assert v.float32("temperature", 1e-60) == 0
    with pytest.raises(InvalidRequest, match="`temperature`"):
        v.float32("temperature", 1e300)


@pytest.mark.parametrize("stop", [["a"] * 5, [""], ["a", ""]])
def test_stop(stop: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="`stop`"):
        v.check_stop(stop, LIMITS)


def test_lengths() -> None:
    assert v.check_lengths(v.NATIVE, 24, None, LIMITS) == 1000
    assert v.check_lengths(v.NATIVE, 512, 512, LIMITS) == 512
    text = r"`inputs` tokens \+ `max_new_tokens` must be <= 1024. Given: 512 `inputs` tokens and 513 `max_new_tokens`"
    with pytest.raises(InvalidRequest, match=text):
        v.check_lengths(v.NATIVE, 512, 513, LIMITS)
    with pytest.raises(InvalidRequest, match=r"must have less than 512 tokens. Given: 513") as caught:
        v.check_lengths(v.CHAT, 513, None, LIMITS)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest, match="empty"):
        v.check_lengths(v.NATIVE, 0, 1, LIMITS)


@pytest.mark.parametrize("bias", [{"100": 1.0}, {"-1": 1.0}, {"abc": 1.0}, {"1.5": 1.0}, {"5": 101.0}, {"\u0663": 1.0}])
def test_logit_bias(bias: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        v.check_logit_bias(bias, LIMITS)
    assert caught.value.field == "logit_bias"


def test_good_logit_bias() -> None:
    assert v.check_logit_bias({"0": -100.0, "99": 100.0}, LIMITS) == {0: -100.0, 99: 100.0}
    assert v.check_logit_bias(None, LIMITS) == {}


INFO = pb.InfoResponse(max_input_tokens=1023, max_total_tokens=1024, max_batch_size=16, vocab_size=9)


def test_limits_come_from_the_shard() -> None:
    found = find_limits(RouterSettings(), INFO)
    assert (found.max_input_tokens, found.max_total_tokens, found.max_batch_size) == (1023, 1024, 16)
    found = find_limits(RouterSettings(max_total_tokens=100, max_batch_size=99), INFO)
    assert (found.max_input_tokens, found.max_total_tokens, found.max_batch_size) == (99, 100, 16)


@pytest.mark.parametrize("settings", [
    RouterSettings(max_total_tokens=1025), RouterSettings(max_input_tokens=1024),
    RouterSettings(max_input_tokens=50, max_total_tokens=50),
])
def test_limits_that_cannot_hold(settings: RouterSettings) -> None:
    with pytest.raises(StartupError, match="--max-"):
        find_limits(settings, INFO)
