"""A real shard process on a tiny model, spoken to over gRPC: the rules of the contract that a client can see."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from headrace._common.intermediate import Intermediate, Token, read_step
from headrace.v1 import generation_pb2 as pb
from tests.processes import ShardProcess

Start = Callable[..., ShardProcess]


@pytest.fixture(scope="module")
def one(shard: Start, tiny_model: Path) -> ShardProcess:
    return shard(tiny_model, "--max-step-tokens", "64", "--max-batch-size", "8", "--batch-lease", "2")


def ask(number: int, text: str = "Hello", n: int = 5, **more: Any) -> pb.Request:
    stopping = pb.Stopping(max_new_tokens=n, ignore_eos=True)
    return pb.Request(id=number, text=text, stopping=stopping, **more)


def prefill(process: ShardProcess, *requests: pb.Request, **more: Any) -> list[pb.Step]:
    return list(process.stub.Prefill(pb.PrefillRequest(requests=requests, **more), timeout=60))


def decode(process: ShardProcess, *batches: int, **more: Any) -> list[pb.Step]:
    return list(process.stub.Decode(pb.DecodeRequest(batch_ids=batches, **more), timeout=60))


def tokens(steps: Iterable[pb.Step], number: int) -> list[int]:
    return [i.token.id for step in steps for i in read_step(step) if i.request_id == number]


def solo(process: ShardProcess, request: pb.Request, owner: str = "solo") -> list[int]:
    steps = prefill(process, request, owner=owner)
    if steps[-1].running:
        steps += decode(process, steps[0].batch_id, owner=owner)
    return tokens(steps, request.id)


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code().name, error.details()


def test_a_prefix_seen_before_is_not_computed_again_and_changes_nothing(one: ShardProcess) -> None:
    text = "The water runs down the hill to the mill. " * 8
    first = solo(one, ask(1, text, cache_salt="a"))
    steps = prefill(one, ask(2, text, cache_salt="a"), owner="again")
    (detail,) = steps[-1].details
    assert detail.cached_tokens >= 16
    assert detail.cached_tokens % 16 == 0
    assert steps[-1].cache.hit_tokens >= detail.cached_tokens
    assert tokens(steps + decode(one, steps[0].batch_id, owner="again"), 2) == first


def test_info_says_what_is_served(one: ShardProcess, tiny_model: Path) -> None:
    info = one.stub.Info(pb.InfoRequest())
    assert (info.model_id, info.dtype, info.device, info.rank, info.world_size, info.leader) == (
        tiny_model.name, "float32", "cpu", 0, 1, True,
    )
    assert (info.vocab_size, list(info.eos_token_ids), info.max_total_tokens, info.max_input_tokens) == (300, [2], 512, 511)
    assert (info.max_batch_size, info.max_step_tokens, info.block_size) == (8, 64, 16)
    warm = one.stub.Warmup(pb.WarmupRequest())
    assert warm == one.stub.Warmup(pb.WarmupRequest())
    assert warm.max_batch_total_tokens == info.blocks * info.block_size
    assert warm.explanation


def test_standard_health_and_reflection(one: ShardProcess) -> None:
    reply = health_pb2_grpc.HealthStub(one.channel).Check(health_pb2.HealthCheckRequest(service="headrace.v1.Generation"))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    assert "headrace.v1.Generation" in ProtoReflectionDescriptorDatabase(one.channel).get_services()


def test_a_step_reads_as_intermediates(one: ShardProcess) -> None:
    steps = prefill(one, ask(1, n=1))
    (only,) = list(read_step(steps[-1]))
    assert isinstance(only, Intermediate)
    assert isinstance(only.token, Token)
    assert only.is_end
    assert steps[-1].details[0].finish_reason == pb.Detail.LENGTH
    assert steps[-1].end == pb.Step.FINISHED


def test_company_chunks_and_resume_change_nothing(one: ShardProcess) -> None:
    long = "A long prompt that takes several chunks of a step. " * 5
    alone = solo(one, ask(1, long, 20))
    steps = prefill(one, ask(1, long, 20), ask(2, "x", 12), ask(3, "yz", 30), max_step_tokens=9)
    steps += decode(one, steps[0].batch_id, max_step_tokens=9)
    assert tokens(steps, 1) == alone
    assert tokens(steps, 2) == solo(one, ask(2, "x", 12))
    for cut in (1, 7, 19):
        again = pb.Request(
            id=4, token_ids=pb.TokenIds(ids=one_prompt(one, long) + alone[:cut]), generated=cut,
            stopping=pb.Stopping(max_new_tokens=20, ignore_eos=True),
        )
        assert solo(one, again) == alone[cut:]


def one_prompt(process: ShardProcess, text: str) -> list[int]:
    """Token ids of a text, as the shard tokenized it."""
    steps = prefill(process, ask(1, text, 1, want=pb.Want(prompt_logprobs=True)), owner="ids")
    return list(steps[-1].details[0].prompt_logprobs.token_id)


def test_a_seed_gives_the_same_text_alone_in_company_and_after_a_resume(one: ShardProcess) -> None:
    sampling = pb.Sampling(temperature=1.5, top_p=0.95, seed=2**64 - 1)
    alone = solo(one, ask(1, "Once", 24, sampling=sampling))
    other = ask(5, "Other", 24, sampling=pb.Sampling(do_sample=True, seed=1))
    steps = prefill(one, other, ask(1, "Once", 24, sampling=sampling))
    steps += decode(one, steps[0].batch_id)
    assert tokens(steps, 1) == alone
    resumed = pb.Request(
        id=1, token_ids=pb.TokenIds(ids=one_prompt(one, "Once") + alone[:9]), generated=9, sampling=sampling,
        stopping=pb.Stopping(max_new_tokens=24, ignore_eos=True),
    )
    assert solo(one, resumed) == alone[9:]
    assert solo(one, ask(1, "Once", 24, sampling=pb.Sampling(temperature=1.5, top_p=0.95, seed=7))) != alone


def test_a_drawn_seed_is_reported_and_repeats_the_text(one: ShardProcess) -> None:
    steps = prefill(one, ask(1, "Hi", 1, sampling=pb.Sampling(do_sample=True)))
    detail = steps[-1].details[0]
    assert detail.seed
    again = solo(one, ask(1, "Hi", 1, sampling=pb.Sampling(do_sample=True, seed=detail.seed)))
    assert again == tokens(steps, 1)


def test_text_top_tokens_and_prompt_logprobs_come_when_asked(one: ShardProcess) -> None:
    want = pb.Want(top_n_tokens=3, prompt_logprobs=True, prompt_top_n_tokens=2)
    steps = prefill(one, ask(1, "Hello", 4, want=want, return_text=True))
    steps += decode(one, steps[0].batch_id)
    details = [d for s in steps for d in s.details]
    first = details[0].prompt_logprobs
    assert len(first.token_id) == 5
    assert math.isnan(first.logprob[0])
    assert all(x < 0 for x in first.logprob[1:])
    assert [len(top.token_id) for top in first.top] == [0, 2, 2, 2, 2]
    for token_id, logprob, top in list(zip(first.token_id, first.logprob, first.top, strict=True))[1:]:
        assert top.logprob[0] >= max(top.logprob[1], logprob)
        assert token_id not in top.token_id or logprob == top.logprob[list(top.token_id).index(token_id)]
    rows = [i for s in steps for i in read_step(s)]
    for row, detail in zip(rows, details, strict=True):
        assert detail.top[0].token_id[0] == row.token.id
        assert detail.top[0].logprob[0] == pytest.approx(row.token.logprob, abs=1e-5)
    assert details[-1].is_end
    assert [d.HasField("prompt_logprobs") for d in details] == [True, False, False, False]
    assert all(d.HasField("text") for d in details)


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (ask(0), "INVALID_ARGUMENT", "id is 0"),
        (ask(1, ""), "INVALID_ARGUMENT", "input is empty"),
        (ask(1, n=0), "INVALID_ARGUMENT", "max_new_tokens is 0"),
        (ask(1, n=509), "INVALID_ARGUMENT", "5 input tokens and max_new_tokens 509 are more than the limit of 512"),
        (ask(1, "word " * 200), "INVALID_ARGUMENT", "limit is 511"),
        (ask(1, "word " * 100000), "INVALID_ARGUMENT", "limit is 511"),
        (pb.Request(id=1, token_ids=pb.TokenIds(ids=[300])), "INVALID_ARGUMENT", "token_ids holds 300, the vocabulary has 300"),
        (pb.Request(id=1, token_ids=pb.TokenIds(ids=[5]), generated=1), "INVALID_ARGUMENT", "generated 1 must be less than"),
        (ask(1, grammar=pb.Grammar(type="bnf", value="a")), "INVALID_ARGUMENT", "grammar is not valid: the type 'bnf'"),
        (ask(1, adapter="x"), "INVALID_ARGUMENT", "adapter 'x'"),
        (ask(1, sampling=pb.Sampling(temperature=0)), "INVALID_ARGUMENT", "temperature is 0.0"),
        (ask(1, sampling=pb.Sampling(temperature=math.nan)), "INVALID_ARGUMENT", "temperature is nan"),
        (ask(1, sampling=pb.Sampling(temperature=math.inf)), "INVALID_ARGUMENT", "temperature is inf"),
        (ask(1, sampling=pb.Sampling(top_p=1.5)), "INVALID_ARGUMENT", "top_p is 1.5"),
        (ask(1, sampling=pb.Sampling(top_k=0)), "INVALID_ARGUMENT", "top_k is 0"),
        (ask(1, sampling=pb.Sampling(logit_bias={300: 1})), "INVALID_ARGUMENT", "logit_bias names 300"),
        (ask(1, sampling=pb.Sampling(logit_bias={3: 101})), "INVALID_ARGUMENT", "logit_bias of 3 is 101"),
        (ask(1, sampling=pb.Sampling(frequency_penalty=3)), "INVALID_ARGUMENT", "frequency_penalty is 3.0"),
    ],
)
def test_bad_input_is_refused_by_name(one: ShardProcess, request_: pb.Request, code: str, words: str) -> None:
    got, details = refusal(lambda: prefill(one, ask(9), request_))
    assert got == code
    assert words in details
    assert f"request {request_.id}" in details


def test_unknown_batches_are_named(one: ShardProcess) -> None:
    for call in (
        lambda: decode(one, 987654321), lambda: prefill(one, ask(1), batch_id=987654321),
        lambda: one.stub.Filter(pb.FilterRequest(batch_id=987654321)),
        lambda: one.stub.Clear(pb.ClearRequest(batch_id=987654321)),
    ):
        code, details = refusal(call)
        assert code == "NOT_FOUND"
        assert "987654321" in details
    assert refusal(lambda: decode(one))[0] == "INVALID_ARGUMENT"
    assert refusal(lambda: prefill(one))[0] == "INVALID_ARGUMENT"


def test_ids_that_repeat_change_nothing(one: ShardProcess) -> None:
    first = prefill(one, ask(5, n=30))
    batch = first[0].batch_id
    assert refusal(lambda: prefill(one, ask(5, "Other"), batch_id=batch))[0] == "ALREADY_EXISTS"
    assert refusal(lambda: prefill(one, ask(7), ask(7)))[0] == "ALREADY_EXISTS"
    other = prefill(one, ask(5, n=30))
    assert refusal(lambda: decode(one, batch, other[0].batch_id))[0] == "ALREADY_EXISTS"
    assert len(tokens(first + decode(one, batch), 5)) == 30
    assert len(tokens(other + decode(one, other[0].batch_id), 5)) == 30


def test_owners_do_not_see_each_other(one: ShardProcess) -> None:
    mine = prefill(one, ask(1, n=20), owner="me")
    batch = mine[0].batch_id
    assert refusal(lambda: decode(one, batch))[0] == "NOT_FOUND"
    assert refusal(lambda: one.stub.Clear(pb.ClearRequest(batch_id=batch, owner="you")))[0] == "NOT_FOUND"
    one.stub.Clear(pb.ClearRequest(owner="you"))
    assert len(tokens(mine + decode(one, batch, owner="me"), 1)) == 20


def test_a_newer_call_takes_over_and_the_older_stream_says_so(one: ShardProcess) -> None:
    expected = solo(one, ask(1, "Take over", 400))
    batch = prefill(one, ask(1, "Take over", 400))[0].batch_id
    older = one.stub.Decode(pb.DecodeRequest(batch_ids=[batch]))
    read = [next(older)]
    newer = decode(one, batch)
    read += list(older)
    assert read[-1].end == pb.Step.YIELDED
    assert newer[-1].end == pb.Step.FINISHED
    assert [expected[0], *tokens(read, 1), *tokens(newer, 1)] == expected


def test_giving_up_a_call_frees_its_batch(one: ShardProcess) -> None:
    stream = one.stub.Prefill(pb.PrefillRequest(requests=[ask(1, "x", 400)]))
    batch = next(iter(stream)).batch_id
    call = one.stub.Decode(pb.DecodeRequest(batch_ids=[batch]))
    next(iter(call))
    call.cancel()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        cache = prefill(one, ask(2, "y", 1))[-1].cache
        if cache.free_blocks == cache.blocks:
            break
        time.sleep(0.2)
    assert cache.free_blocks == cache.blocks
    assert refusal(lambda: decode(one, batch))[0] == "NOT_FOUND"


def test_a_deadline_in_a_prefill_disturbs_nobody(one: ShardProcess) -> None:
    with pytest.raises(grpc.RpcError):
        list(one.stub.Prefill(pb.PrefillRequest(requests=[ask(1, "word " * 90, 50)]), timeout=0.001))
    assert len(solo(one, ask(2))) == 5


def test_a_client_that_never_reads_stops_only_its_own_rows(one: ShardProcess) -> None:
    first = prefill(one, ask(1, "x", 400), owner="sleeper")
    sleeper = one.stub.Decode(pb.DecodeRequest(batch_ids=[first[0].batch_id], owner="sleeper"))
    assert len(solo(one, ask(2, "y", 300))) == 300
    rest = list(sleeper)
    assert len(tokens(first + rest, 1)) == 400


def test_rows_that_are_full_are_refused_before_anything_is_admitted(one: ShardProcess) -> None:
    one.stub.Clear(pb.ClearRequest())
    held = prefill(one, *(ask(i, n=3) for i in range(1, 8)))
    code, details = refusal(lambda: prefill(one, ask(11), ask(12)))
    assert code == "RESOURCE_EXHAUSTED"
    assert "1 of 8 rows" in details
    assert held[-1].running == 7
    decode(one, held[0].batch_id)


def test_a_dry_pool_preempts_and_the_client_resumes(shard: Start, tiny_model: Path) -> None:
    small = shard(tiny_model, "--max-batch-total-tokens", "160", "--max-total-tokens", "160")
    want = {n: solo(small, ask(n, f"Prompt {n}", 90)) for n in (1, 2, 3)}
    got: dict[int, list[int]] = {n: [] for n in want}
    waiting, batch, rounds = list(want), 0, 0
    while waiting:
        rounds += 1
        ready, waiting = waiting, []
        requests = [
            pb.Request(
                id=n, token_ids=pb.TokenIds(ids=one_prompt(small, f"Prompt {n}") + got[n]), generated=len(got[n]),
                stopping=pb.Stopping(max_new_tokens=90, ignore_eos=True),
            )
            for n in ready
        ]
        try:
            steps = prefill(small, *requests)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            steps = prefill(small, requests[0])
            waiting += ready[1:]
        batch = steps[0].batch_id
        if steps[-1].running:
            steps += decode(small, batch)
        for n in ready:
            got[n] += tokens(steps, n)
        waiting += [n for s in steps for n in s.preempted]
        assert rounds < 20
    assert got == want
    assert rounds > 1


def test_sigterm_ends_the_process_and_removes_its_socket(tiny_model: Path) -> None:
    process = ShardProcess(tiny_model)
    process.wait_ready()
    assert process.stop() == 0
    assert not os.path.exists(process.socket)


def test_a_shard_outlives_no_launcher(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HEADRACE_PARENT_PID names a process that is not the parent: the shard must end by itself."""
    monkeypatch.setenv("HEADRACE_PARENT_PID", "1")
    process = ShardProcess(tiny_model)
    assert process.popen.wait(30) == 1
    assert not os.path.exists(process.socket)
    process.stop()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-total-tokens", "100000"), "--max-total-tokens 100000 is more than the model's window of 512 tokens"),
        (("--max-input-tokens", "512"), "--max-input-tokens 512 must be less than --max-total-tokens 512"),
        (("--rank", "1"), "--rank 1 is not below --num-shard 1"),
        (("--shard-uds-path", "/proc/nowhere/s"), "cannot create the socket /proc/nowhere/s-0"),
        (("--shard-uds-path", "/tmp/" + "x" * 120), "longer than the system's 107 bytes"),
    ],
)
def test_a_start_that_cannot_work_is_one_line(tiny_model: Path, flags: tuple[str, ...], words: str) -> None:
    process = ShardProcess(tiny_model, *flags)
    assert process.popen.wait(60) != 0
    lines = process.log().strip().splitlines()
    assert words in lines[-1]
    assert "Traceback" not in process.log()
    process.stop()


def test_a_socket_in_use_is_not_taken_over(one: ShardProcess, tiny_model: Path) -> None:
    second = ShardProcess(tiny_model, "--shard-uds-path", one.socket.removesuffix("-0"))
    assert second.popen.wait(30) == 1
    assert "another process listens on" in second.log()
    assert len(solo(one, ask(1))) == 5


def test_sigkill_leaves_a_socket_that_the_next_start_replaces(tiny_model: Path) -> None:
    first = ShardProcess(tiny_model)
    first.wait_ready()
    first.popen.send_signal(signal.SIGKILL)
    first.popen.wait(10)
    assert os.path.exists(first.socket)
    second = ShardProcess(tiny_model, "--shard-uds-path", first.socket.removesuffix("-0"))
    second.channel = first.channel
    second.stub = first.stub
    second.wait_ready()
    assert second.stop() == 0
