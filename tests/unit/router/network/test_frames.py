"""The worker protocol's frames: both codings, unknown kinds, and what is no frame."""

from __future__ import annotations

import json

import msgspec
import pytest

from headrace._common.grammars import Grammar
from headrace_router.network import frames
from headrace_router.network.frames import PROTOCOLS, Codec, Malformed
from headrace_router.network.jobs import Job, Lease
from headrace_router.network.wire import to_frame, to_request
from headrace_router.types import GenerateRequest, Sampling

FRAMES: list[msgspec.Struct] = [
    frames.Step([("j", 1, 0, 5, None, 0, [(5, -0.5)])]), frames.Done("j", 1), frames.Bye("over"),
    frames.Hello([frames.Model("m", format="f32")], 4), frames.Status([("j", 1, 7)]),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_frames_come_back(protocol: str) -> None:
    codec = Codec(protocol, frames.FromWorker)
    for frame in FRAMES:
        assert codec.decode(codec.encode(frame)) == frame
    other = Codec(protocol, frames.FromGateway)
    assert other.decode(codec.encode(FRAMES[0])) is None  # of an unknown kind for that end


def test_what_is_unknown_is_ignored_and_what_is_wrong_is_not() -> None:
    codec = Codec(PROTOCOLS[1], frames.FromWorker)
    assert codec.decode('{"t": "news", "x": [1]}') is None
    assert codec.decode('{"t": "bye", "reason": "x", "mood": "good"}') == frames.Bye("x")
    for wrong in ("", "[]", "{}", '{"t": "step"}', '{"t": "step", "x": [[1]]}', '{"t": 5}', "[" * 10_000, "\udcff"):
        with pytest.raises(Malformed):
            codec.decode(wrong.encode("utf-8", "surrogateescape"))


def test_a_job_crosses_as_it_is_and_says_nothing_else() -> None:
    request = GenerateRequest(
        [3, 4, 5], 20, Sampling(True, seed=9, temperature=0.5, top_k=4, logit_bias={7: 1.5}), stop=("secret",),
        stop_token_ids=(8,), min_new_tokens=2, ignore_eos=True, top_n_tokens=2, prompt_logprobs=True,
        grammar=Grammar("regex", "a+"), workload="agent",
    )
    lease = Lease(Job("j", "tenant/agent", 1.0, request), 2, (10, 11), 0.0)
    data = Codec(PROTOCOLS[1], frames.FromGateway).encode(to_frame(lease, "m"))
    frame = json.loads(data)
    assert (frame["input_ids"], frame["prefix_len"], frame["rng_offset"]) == ([3, 4, 5, 10, 11], 3, 2)
    assert frame["params"]["max_new_tokens"] == 18
    assert b"secret" not in data
    assert b"tenant" not in data
    again = to_request(Codec(PROTOCOLS[1], frames.FromGateway).decode(data))
    assert (again.prompt, again.generated, again.max_new_tokens) == ([3, 4, 5], (10, 11), 20)
    assert (again.sampling, again.stop_token_ids, again.grammar) == (request.sampling, (8,), request.grammar)
    assert (again.min_new_tokens, again.ignore_eos, again.top_n_tokens, again.workload) == (2, True, 2, "agent")
    assert not again.prompt_logprobs  # they went out with the first token
