"""One spelling of a request: what bears on the output is in its bytes, nothing else is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace_router.canonical import canonical, settle
from headrace_router.tenants import Tenant
from headrace_router.types import GenerateRequest, Sampling

SAMPLINGS: dict[str, Any] = {
    "do_sample": False, "seed": 8, "temperature": 0.6, "top_k": 5, "top_p": 0.5, "typical_p": 0.5, "min_p": 0.5,
    "repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 1.0, "logit_bias": {3: 1.0}, "watermark": True,
}
DRAWN = Sampling(do_sample=True, seed=7, temperature=0.5)
BASE = GenerateRequest(prompt=[1, 2, 3], max_new_tokens=5, sampling=DRAWN, stop=("a", "b"))


def with_(**changes: Any) -> bytes:
    return canonical(dataclasses.replace(BASE, **changes))


@pytest.mark.parametrize("changes", [
    {"tenant": Tenant("somebody", cache_salt="x")}, {"workload": "document"}, {"stop": ("b", "a")}, {"stop": ("a", "b", "a")},
])
def test_what_changes_no_output(changes: dict[str, Any]) -> None:
    assert with_(**changes) == canonical(BASE)


@pytest.mark.parametrize("changes", [
    {"prompt": [1, 2]}, {"max_new_tokens": 6}, {"stop": ("a",)}, {"keep_stop": False}, {"stop_token_ids": (4,)},
    {"min_new_tokens": 1}, {"ignore_eos": True}, {"top_n_tokens": 1}, {"prompt_logprobs": True}, {"shown_tokens": (4,)},
    *({"sampling": dataclasses.replace(DRAWN, **{name: value})} for name, value in SAMPLINGS.items()),
])
def test_what_changes_the_output(changes: dict[str, Any]) -> None:
    assert with_(**changes) != canonical(BASE)


def test_keeping_a_stop_string_that_there_is_not_changes_nothing() -> None:
    assert with_(stop=(), keep_stop=True) == with_(stop=(), keep_stop=False)


def test_the_bytes_stay() -> None:
    """Caches outlive the process: another layout needs another version."""
    assert canonical(GenerateRequest(prompt=[1, 2], max_new_tokens=3)).hex() == (
        "87a96b6565705f73746f70c2ae6d61785f6e65775f746f6b656e7303a670726f6d7074920102a873616d706c696e6780a473746f7090ae"
        "73746f705f746f6b656e5f69647390a776657273696f6e01"
    )


def test_neutral_values_are_off() -> None:
    neutral = Sampling(
        do_sample=True, seed=7, temperature=1.0, top_k=100, top_p=1.0, typical_p=1.0, min_p=0.0, repetition_penalty=1.0,
        frequency_penalty=0.0, presence_penalty=0.0, logit_bias={1: 0.0, 2: 3.0},
    )
    assert settle(neutral, 100) == Sampling(do_sample=True, seed=7, logit_bias={2: 3.0})
    greedy = dataclasses.replace(neutral, do_sample=False, temperature=0.5, top_k=3, repetition_penalty=2.0, logit_bias={})
    assert settle(greedy, 100) == Sampling(repetition_penalty=2.0)
