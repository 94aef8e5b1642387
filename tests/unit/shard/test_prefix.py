"""The prefix cache in the executor: what is not computed again, for whom, and that no token changes by it.

The stand-in model keeps token ids in its cache, so that a block shared wrongly gives a wrong token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_shard.calls import Call
from headrace_shard.kv.blocks import BLOCK_SIZE
from headrace_shard.requests import ERROR, FINISHED, Detail, Request
from tests.unit.shard.test_executor import POISON, PROMPT, Driver, expected, expected_of_two_kinds, request

PREFIX = list(range(3, 43))  # 40 tokens: two full blocks and a half


def serve(d: Driver, *requests: Request) -> tuple[dict[int, list[int]], dict[int, Detail]]:
    """Run requests to their end in a batch of their own; their tokens, and their last details."""
    first = d.prefill(*requests)
    rest = d.decode(d.executor._table._next_id - (1 if d.executor._table.batches else 0))
    d.run()
    if first in d.errors:
        raise d.errors[first]
    details = {x.request_id: x for c in (first, rest) for s in d.out[c] for x in s.details}
    return d.tokens(first, rest), details


def computed(d: Driver) -> int:
    """Tokens of forward passes since the last time it was asked."""
    total = sum(d.model.sizes)
    d.model.sizes.clear()
    return total


def test_a_prompt_seen_before_is_computed_from_its_last_full_block_on() -> None:
    d = Driver(step_tokens=64)
    serve(d, request(1, PREFIX, 1))
    assert computed(d) == 40
    tokens, details = serve(d, request(2, [*PREFIX, 7, 8], 3))
    assert tokens[2] == expected([*PREFIX, 7, 8], 3)
    assert details[2].cached_tokens == 2 * BLOCK_SIZE
    assert computed(d) == 42 - 2 * BLOCK_SIZE + 2
    assert (d.executor._prefix.asked, d.executor._prefix.hits) == (82, 32)


def test_the_last_token_is_computed_even_if_all_blocks_are_there() -> None:
    d = Driver(step_tokens=64)
    prompt = PREFIX[: 2 * BLOCK_SIZE]
    serve(d, request(1, prompt, 1))
    tokens, details = serve(d, request(2, prompt, 2))
    assert tokens[2] == expected(prompt, 2)
    assert details[2].cached_tokens == BLOCK_SIZE


@pytest.mark.parametrize(("prompts_differ", "blocks"), [(False, 4), (True, 2)])
def test_output_is_found_again_as_the_next_turn_of_a_chat(prompts_differ: bool, blocks: int) -> None:
    """But not where that would have computed it otherwise."""
    d = Driver(step_tokens=64, prompts_differ=prompts_differ)
    said = serve(d, request(1, PREFIX, 30))[0][1]
    turn = [*PREFIX, *said, 9]
    tokens, details = serve(d, request(2, turn, 5))
    assert details[2].cached_tokens == blocks * BLOCK_SIZE  # 69 tokens were computed, 40 of them as a prompt
    assert tokens[2] == (expected_of_two_kinds if prompts_differ else expected)(turn, 5)


@pytest.mark.parametrize("length", [2 * BLOCK_SIZE - 1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 40])
def test_where_prompts_differ_a_block_is_found_by_where_the_prompt_ends(length: int) -> None:
    d = Driver(step_tokens=64, prompts_differ=True)
    said = serve(d, request(1, PREFIX[:length], 40))[0][1]
    text = np.array(PREFIX[:length] + said[:33], dtype=np.int32)

    def cached(number: int, generated: int) -> int:
        return serve(d, Request(number, text, generated, generated + 1))[1][number].cached_tokens // BLOCK_SIZE

    whole = (len(text) - 1) // BLOCK_SIZE
    assert [cached(2, 33), cached(3, 32), cached(4, 0)] == [whole, length // BLOCK_SIZE, (length + 1) // BLOCK_SIZE]
    assert [cached(5, 33), cached(6, 32), cached(7, 0)] == [whole] * 3


@pytest.mark.parametrize("prompts_differ", [False, True])
def test_who_waits_counts_the_blocks_that_it_will_find(prompts_differ: bool) -> None:
    d = Driver(step_tokens=64, prompts_differ=prompts_differ)
    calls = [d.prefill(request(1, PREFIX, 50)), d.decode(1)]
    d.turn(31)
    text = np.array(PREFIX + d.tokens(*calls)[1][:30], dtype=np.int32)
    for number, generated, blocks in ((2, 30, 4), (3, 0, 2 if prompts_differ else 4)):
        waiting = Request(number, text, generated, 40)
        assert d.executor._prefix.shared(waiting) == blocks
        calls.append(d.prefill(waiting, batch=1))
        d.turn(4)
        assert d.rows.cached[next(s for s in range(8) if d.rows.ids[s] == number)] == blocks * BLOCK_SIZE


TEXT = [3 + n * n % 45 for n in range(100)]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 69), st.integers(1, 40)), min_size=2, max_size=8),
    st.integers(1, 64),
)
def test_no_token_is_taken_for_one_of_another_kind(jobs: list[tuple[int, int, int]], step_tokens: int) -> None:
    """Requests over beginnings of the same text, of which each has made another part itself."""
    d = Driver(step_tokens=step_tokens, prompts_differ=True)
    for number, (length, generated, count) in enumerate(jobs, 1):
        generated = min(generated, length - 1)
        prompt = length - generated
        resumed = Request(number, np.array(TEXT[:length], dtype=np.int32), generated, generated + count)
        seen = [*(token + PROMPT for token in TEXT[:prompt]), *TEXT[prompt:length]]
        assert serve(d, resumed)[0][number] == expected(seen, count)


def test_the_first_token_of_a_hit_says_what_was_cached() -> None:
    d = Driver(step_tokens=64)
    serve(d, request(1, PREFIX, 1))
    call = d.prefill(request(2, PREFIX, 5))
    d.run()
    assert [(x.cached_tokens, x.finish_reason) for s in d.out[call] for x in s.details] == [(32, 0)]


def test_requests_that_come_together_compute_a_shared_prefix_once() -> None:
    d = Driver(step_tokens=48, rows=8)
    tokens, _details = serve(d, *(request(i, [*PREFIX, i], 4) for i in range(1, 9)))
    assert tokens == {i: expected([*PREFIX, i], 4) for i in range(1, 9)}
    assert computed(d) == 41 + 7 * (41 - 2 * BLOCK_SIZE) + 8 * 3
    assert d.blocks.free == 40


def test_salts_are_not_mixed() -> None:
    d = Driver(step_tokens=64)
    serve(d, request(1, PREFIX, 1, cache_salt="a"))
    assert serve(d, request(2, PREFIX, 1, cache_salt="b"))[1][2].cached_tokens == 0
    assert serve(d, request(3, PREFIX, 1, cache_salt="a"))[1][3].cached_tokens == 32


def test_prompt_logprobs_need_the_whole_prompt() -> None:
    d = Driver(step_tokens=64)
    serve(d, request(1, PREFIX, 1))
    detail = serve(d, request(2, PREFIX, 1, prompt_logprobs=True))[1][2]
    assert detail.cached_tokens == 0
    assert len((detail.prompt_logprobs or ([], []))[1]) == 40


def test_blocks_of_a_request_that_failed_are_not_used_again() -> None:
    d = Driver(step_tokens=16)
    bad = [*PREFIX[:20], POISON, *PREFIX[20:]]
    assert serve(d, request(1, bad, 1))[1][1].finish_reason == ERROR
    assert d.blocks.cached == 0


@pytest.mark.parametrize("prompts_differ", [False, True])
def test_a_preempted_request_finds_its_own_blocks(prompts_differ: bool) -> None:
    d = Driver(blocks=8, prompts_differ=prompts_differ)
    d.prefill(request(1, [5], 90, priority=1), request(2, [6], 90))
    call = d.decode(1)
    d.turn(75)
    assert [n for c in d.out for s in d.out[c] for n in s.preempted] == [2]
    said = d.tokens(*d.out)[2]
    d.executor.cancel(call)
    d.executor.clear(0, "")
    d.run()
    again = Request(2, np.array([6, *said], dtype=np.int32), len(said), 90)
    tokens, details = serve(d, again)
    assert said + tokens[2] == (expected_of_two_kinds if prompts_differ else expected)([6], 90)
    assert details[2].cached_tokens >= len(said) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE


def test_running_requests_share_room() -> None:
    d = Driver(blocks=6, step_tokens=64)
    d.prefill(request(1, PREFIX, 20))
    d.decode(1)
    d.turn(2)
    call = d.prefill(request(2, PREFIX, 4), batch=1)  # needs 3 blocks; 3 are free, of which one is for growth
    d.decode(1)
    d.run()
    assert call not in d.errors
    assert d.tokens(*d.out)[2] == expected(PREFIX, 4)


def test_without_the_cache_every_prompt_is_computed() -> None:
    d = Driver(step_tokens=64)
    d.executor._prefix._enabled = False
    serve(d, request(1, PREFIX, 1))
    _tokens, details = serve(d, request(2, PREFIX, 1))
    assert (details[2].cached_tokens, computed(d)) == (0, 80)


TAILS = st.lists(st.integers(3, 5), max_size=30)


@pytest.mark.parametrize("prompts_differ", [False, True])
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 40), TAILS, st.integers(1, 30), st.sampled_from(["", "x"])), min_size=1, max_size=12),
    st.integers(8, 30), st.integers(1, 40), st.integers(1, 4),
)
def test_no_token_depends_on_what_was_cached(
    prompts_differ: bool, jobs: list[tuple[int, list[int], int, str]], blocks: int, step_tokens: int, at_once: int
) -> None:
    """Requests with prefixes in common, a few at a time, in a pool so small that blocks are evicted and rows preempted."""
    d = Driver(blocks=blocks, rows=4, step_tokens=step_tokens, prompts_differ=prompts_differ)
    says = expected_of_two_kinds if prompts_differ else expected
    waiting = []
    for number, (shared, tail, count, salt) in enumerate(jobs, 1):
        prompt = [*PREFIX[:shared], *tail] or [3]
        waiting.append((request(number, prompt, min(count, 128 - len(prompt)), cache_salt=salt), prompt))
    wanted = {r.id: says(prompt, r.max_new) for r, prompt in waiting}
    got: dict[int, list[int]] = {r.id: [] for r, _ in waiting}
    for _ in range(400):
        if not waiting:
            break
        group, waiting = waiting[:at_once], waiting[at_once:]
        first = d.prefill(*(r for r, _ in group))
        d.turn()
        if first in d.errors:  # no room for all of them
            at_once = max(1, at_once // 2)
            waiting = group + waiting
            continue
        calls: list[Call] = [first, d.decode(d.executor._table._next_id - 1)]
        d.run()
        assert d.end(calls[1]) == FINISHED or calls[1] in d.errors
        for n, tokens in d.tokens(*calls).items():
            got[n] += tokens
        prompts = {r.id: prompt for r, prompt in group}
        requests = {r.id: r for r, _ in group}
        for n in [n for c in calls for s in d.out[c] for n in s.preempted]:
            known = np.array(prompts[n] + got[n], dtype=np.int32)
            again = replace(requests[n], tokens=known, generated=len(got[n]), block_keys=[])
            waiting.append((again, prompts[n]))
    assert got == wanted
    assert d.blocks.free == blocks
