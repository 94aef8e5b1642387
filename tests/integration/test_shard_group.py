"""Two real ranks on a tiny model: the same answers, the whole service on each socket, and ends that are seen."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.v1 import generation_pb2 as pb
from tests.models import write_tiny_model
from tests.processes import ShardGroup, ShardProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("uneven"), hidden_size=96, num_attention_heads=6, num_key_value_heads=3)


@pytest.fixture(scope="module")
def pair(shard_group: Callable[..., ShardGroup], model: Path) -> ShardGroup:
    return shard_group(model, 2, "--max-step-tokens", "64")


def ask(number: int, text: str, n: int) -> pb.Request:
    stopping = pb.Stopping(max_new_tokens=n, ignore_eos=True)
    return pb.Request(id=number, text=text, stopping=stopping, want=pb.Want(top_n_tokens=2))


def answer(process: ShardProcess, *requests: pb.Request) -> dict[int, list[int]]:
    steps = list(process.stub.Prefill(pb.PrefillRequest(requests=requests, owner="t"), timeout=60))
    if steps[-1].running:
        steps += list(process.stub.Decode(pb.DecodeRequest(batch_ids=[steps[0].batch_id], owner="t"), timeout=60))
    got: dict[int, list[int]] = {r.id: [] for r in requests}
    for step in steps:
        for number, token in zip(step.intermediates.request_id, step.intermediates.token_id, strict=True):
            got[number].append(token)
    return got


REQUESTS = [ask(1, "One prompt", 20), ask(2, "Another, longer prompt. " * 8, 30), ask(3, "x", 9)]


def test_two_ranks_answer_as_one_does(pair: ShardGroup, shard: Callable[..., ShardProcess], model: Path) -> None:
    alone = shard(model, "--max-step-tokens", "64")
    assert answer(pair.ranks[0], *REQUESTS) == answer(alone, *REQUESTS)


def test_every_rank_serves_the_service(pair: ShardGroup) -> None:
    leader, follower = pair.ranks
    assert answer(follower, *REQUESTS) == answer(leader, *REQUESTS)
    info = [rank.stub.Info(pb.InfoRequest()) for rank in pair.ranks]
    assert [(i.rank, i.leader, i.world_size) for i in info] == [(0, True, 2), (1, False, 2)]
    assert info[0].blocks == info[1].blocks
    assert leader.stub.Warmup(pb.WarmupRequest()) == follower.stub.Warmup(pb.WarmupRequest())


def test_the_relay_passes_status_details_metadata_and_deadline(pair: ShardGroup) -> None:
    leader, follower = pair.ranks
    got = []
    for rank in (leader, follower):
        with pytest.raises(grpc.RpcError) as caught:
            rank.stub.Filter(pb.FilterRequest(batch_id=77))
        error: Any = caught.value
        got.append((error.code(), error.details()))
        with pytest.raises(grpc.RpcError) as caught:
            list(rank.stub.Prefill(pb.PrefillRequest()))
        error = caught.value
        got.append((error.code(), error.details()))
    assert got[:2] == got[2:]
    call = follower.stub.Prefill(pb.PrefillRequest(requests=[ask(1, "x", 1)]))
    assert len(list(call)) == 1
    assert ("headrace-leader", "0") in [tuple(m) for m in call.trailing_metadata()]
    with pytest.raises(grpc.RpcError) as caught:
        list(follower.stub.Prefill(pb.PrefillRequest(requests=[ask(1, "word " * 40, 300)]), timeout=0.001))
    late: Any = caught.value
    assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_cancel_through_the_relay_frees_the_batch(pair: ShardGroup) -> None:
    leader, follower = pair.ranks
    leader.stub.Clear(pb.ClearRequest())
    first = list(follower.stub.Prefill(pb.PrefillRequest(requests=[ask(1, "x", 400)])))
    call = follower.stub.Decode(pb.DecodeRequest(batch_ids=[first[0].batch_id]))
    next(iter(call))
    call.cancel()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        cache = list(leader.stub.Prefill(pb.PrefillRequest(requests=[ask(2, "y", 1)])))[-1].cache
        if cache.free_blocks == cache.blocks:
            return
        time.sleep(0.3)
    raise AssertionError("the batch is still there")


def test_idling_trips_no_timeout(pair: ShardGroup) -> None:
    time.sleep(11)  # longer than a step may take
    assert len(answer(pair.ranks[1], ask(1, "still there", 3))[1]) == 3


def test_a_dead_rank_is_seen_and_said(model: Path) -> None:
    group = ShardGroup(model, 2).wait_ready()
    leader, follower = group.ranks
    first = list(leader.stub.Prefill(pb.PrefillRequest(requests=[ask(1, "x", 400)])))
    call = leader.stub.Decode(pb.DecodeRequest(batch_ids=[first[0].batch_id]))
    next(iter(call))
    follower.popen.send_signal(signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "lost another rank: rank 1 has ended" in error.details()
    assert time.monotonic() - begun < 5
    assert leader.popen.wait(10) == 3
    assert not Path(leader.socket).exists()
    assert not Path(leader.socket.removesuffix("-0") + "-rendezvous").exists()
    group.stop()


def test_a_rank_that_is_told_to_stop_while_it_waits_leaves_nothing(model: Path) -> None:
    process = ShardProcess(model, "--rank", "0", "--num-shard", "2")
    place = Path(process.socket.removesuffix("-0") + "-rendezvous")
    end = time.monotonic() + 60
    while not place.exists():
        process.check_alive()
        assert time.monotonic() < end
        time.sleep(0.05)
    assert process.stop() == 0
    assert list(place.parent.iterdir()) == []


def test_more_ranks_than_heads_are_refused_by_number(model: Path) -> None:
    process = ShardProcess(model, "--rank", "0", "--num-shard", "7")
    assert process.popen.wait(60) == 1
    assert "--num-shard 7 is more than the model's 6 attention heads" in process.log().splitlines()[-1]
    process.stop()


def test_grammars_hold_through_every_rank(pair: ShardGroup) -> None:
    request = ask(7, "Hello", 20)
    request.grammar.type, request.grammar.value = "regex", "[0-9]{4}"
    for rank in pair.ranks:
        assert "grammar" in rank.stub.Info(pb.InfoRequest()).features
        steps = list(rank.stub.Prefill(pb.PrefillRequest(requests=[request]), timeout=60))
        steps += rank.stub.Decode(pb.DecodeRequest(batch_ids=[steps[0].batch_id]), timeout=60)
        assert sum(len(step.intermediates.token_id) for step in steps) == 5  # and the end token
        assert steps[-1].details[-1].finish_reason == pb.Detail.EOS_TOKEN
