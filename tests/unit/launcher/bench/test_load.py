"""Bodies and arrivals of the load client, and the length of its prompts."""

from __future__ import annotations

import pytest

from headrace_launcher.bench.load import Load, arrivals, make_body
from headrace_launcher.bench.prompts import numbered_list

URL = "http://localhost"


def test_bodies() -> None:
    assert make_body(Load(URL, "tgi", output_len=7), "hi") == {
        "inputs": "hi", "parameters": {"max_new_tokens": 7, "details": True}, "stream": True,
    }
    completion = make_body(Load(URL, "completions", output_len=7, ignore_eos=True), [1, 2])
    assert (completion["prompt"], completion["max_tokens"], completion["ignore_eos"]) == ([1, 2], 7, True)
    assert completion["min_tokens"] == 7
    chat = make_body(Load(URL, "chat"), "hi")
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert "ignore_eos" not in chat


def test_a_temperature_samples() -> None:
    assert make_body(Load(URL, "tgi", temperature=0.5), "hi")["parameters"]["do_sample"] is True
    assert make_body(Load(URL, "chat", temperature=0.5), "hi")["temperature"] == 0.5


def test_token_ids_are_for_completions_alone() -> None:
    for api in ("tgi", "chat"):
        with pytest.raises(ValueError, match="token ids"):
            make_body(Load(URL, api), [1, 2])


def test_arrivals() -> None:
    at = arrivals(10.0, 2000, seed=1)
    assert at == arrivals(10.0, 2000, seed=1) == sorted(at)
    assert at[0] == 0
    assert at[-1] == pytest.approx(200, rel=0.1)


def test_prompts_depend_on_the_seed_alone() -> None:
    assert numbered_list(64, 1) == numbered_list(64, 1) != numbered_list(64, 2)
    assert numbered_list(9, 1).startswith("1. ")
    assert [numbered_list(n, 1).count("\n") for n in (1, 4, 5, 36, 41)] == [1, 1, 2, 9, 10]
