"""The simulator: its arithmetic on one request, that nothing is lost, and what each policy is known for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from bench.simulate import capacity, find_capacity, in_time, lines, run
from bench.simulation.cost import MACHINES, Machine
from bench.simulation.engine import Simulation, Trace
from bench.simulation.policies import POLICIES, Headrace, Policy, Running, Tgi
from headrace_launcher.bench.load import arrivals
from headrace_launcher.bench.stats import percentile
from headrace_launcher.bench.workloads import WORKLOADS, Lengths, draw_lengths
from headrace_router.presets import PRESETS, Preset

MACHINE = Machine(base=0.010, row=0.001, prompt=0.001, context=0.0, kv_tokens=64_000)
TUNED = Preset(max_step_tokens=256, itl_target_ms=100, max_queue_size=10_000, max_queue_tokens=1 << 30)
MIXED = draw_lengths(tuple(WORKLOADS), 70, seed=2)


def gaps(trace: Trace, workload: str) -> list[float]:
    mine = [request for request in trace.ended if request.workload == workload]
    return [b - a for request in mine for a, b in zip(request.times, request.times[1:], strict=False)]


def waits(trace: Trace, workload: str) -> list[float]:
    return [request.times[0] - request.at for request in trace.ended if request.workload == workload]


def test_one_request_takes_what_its_steps_cost() -> None:
    drawn = [Lengths("chat", 0, 0, 300, 3)]
    chunked = Simulation(Policy, MACHINE, TUNED).run(drawn, [1.0])
    assert chunked.ended[0].times == pytest.approx([1 + 0.266 + 0.054, 1.331, 1.342])  # chunks of 256 and 44 tokens
    whole = Simulation(Tgi, MACHINE, TUNED).run(drawn, [1.0])
    assert whole.ended[0].times == pytest.approx([1.310, 1.321, 1.332])
    assert (chunked.steps, whole.steps) == (4, 3)


def test_a_shared_beginning_is_computed_once() -> None:
    drawn = [Lengths("agent", 1, 160, 10, 1)] * 2
    trace = Simulation(Policy, MACHINE, TUNED).run(drawn, [0.0, 9.0])
    assert [r.times[0] - r.at for r in trace.ended] == pytest.approx([0.180, 0.020])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kv_tokens", [640_000, 5_000])
def test_nothing_is_lost_and_the_same_comes_again(name: str, kv_tokens: int) -> None:
    machine = Machine(MACHINE.base, MACHINE.row, MACHINE.prompt, 1e-6, kv_tokens)
    at = arrivals(2.0, len(MIXED), seed=1)
    first = Simulation(POLICIES[name], machine, TUNED)
    trace = first.run(MIXED, at)
    assert len(trace.ended) == len({request.arrival for request in trace.ended}) == len(MIXED)
    assert all(len(request.times) == request.said == request.lengths.output for request in trace.ended)
    assert all(request.times == sorted(request.times) for request in trace.ended)
    assert first.free == first.blocks
    assert (trace.preempted > 0) == (kv_tokens == 5_000 and name != "tgi")  # who reserves all never has to
    again = Simulation(POLICIES[name], machine, TUNED).run(MIXED, at)
    assert [request.times for request in again.ended] == [request.times for request in trace.ended]


def test_who_could_never_run_is_named() -> None:
    with pytest.raises(ValueError, match="larger than the KV cache"):
        Simulation(Policy, MACHINE, TUNED).run([Lengths("document", 0, 0, 64_000, 1)], [0.0])


def test_a_full_queue_refuses() -> None:
    tuned = Preset(256, 100, max_queue_size=3, max_queue_tokens=1 << 30)
    trace = Simulation(Headrace, MACHINE, tuned, max_batch=1).run([Lengths("chat", 0, 0, 10, 10)] * 9, [0.0] * 9)
    assert (len(trace.ended), len(trace.refused)) == (4, 5)  # one has the place, three wait


def test_the_queue_is_bounded_by_tokens() -> None:
    tuned = Preset(256, 100, max_queue_size=100, max_queue_tokens=60)
    trace = Simulation(Headrace, MACHINE, tuned, max_batch=1).run([Lengths("chat", 0, 0, 10, 10)] * 9, [0.0] * 9)
    assert (len(trace.ended), len(trace.refused)) == (3, 6)  # of 20 tokens each


def test_clients_that_leave_free_what_they_hold() -> None:
    drawn = [Lengths("document", 0, 0, 3000, 50)] * 4  # 3 s of prompt each
    for name, policy in POLICIES.items():
        simulation = Simulation(policy, MACHINE, TUNED)
        trace = simulation.run(drawn, [0.0, 0.0, 0.0, 0.0], patience=8.0)
        assert len(trace.ended) + len(trace.late) == 4, name
        assert len(trace.late) >= 1
        assert simulation.free == simulation.blocks


def test_three_times_the_capacity_of_clients_that_leave() -> None:
    """Others than ours serve requests that are of no use any more; ours turns them away, and starves nobody."""
    cpu, tuned = MACHINES["cpu"], replace(PRESETS["chat"], max_step_tokens=256)

    def attempt(policy: type[Policy], rate: float) -> tuple[list[Lengths], Trace]:
        drawn = draw_lengths(tuple(WORKLOADS), max(round(60 * rate), 20), 1, 0.1, output_len=8)
        return drawn, run(policy, cpu, tuned, drawn, rate, 1, patience=6.0, tenants=2)

    found = {name: find_capacity(partial(attempt, policy), 3.0) for name, policy in POLICIES.items()}
    assert found["headrace"] > 0.9 * max(found.values())
    for name, policy in POLICIES.items():
        drawn, trace = attempt(policy, 3 * found[name])
        good = in_time(trace)
        kept = len(good) / trace.seconds / found[name]
        if name != "headrace":
            assert kept < 0.5
            continue
        assert kept > 0.9
        for workload in WORKLOADS:
            all_of_it = sum(lengths.workload == workload for lengths in drawn)
            assert sum(request.workload == workload for request in good) > 0.05 * all_of_it
        shares = [sum(request.tenant.name == f"tenant {n}" for request in good) for n in range(2)]
        assert max(shares) < 1.25 * min(shares)


def test_long_prompts_freeze_chats_only_where_they_have_steps_of_their_own() -> None:
    rate = 0.5 * capacity(MACHINE, MIXED, 32)
    frozen, even = (max(gaps(run(policy, MACHINE, TUNED, MIXED, rate, 1), "chat")) for policy in (Tgi, Headrace))
    assert frozen > 1.0  # a prompt of 1,000 tokens and more
    assert even < 0.25  # twice the target, at most, and the rows


def test_under_three_times_the_load_chats_come_first_and_nobody_starves() -> None:
    drawn = draw_lengths(tuple(WORKLOADS), 150, seed=3)
    rate = 3 * capacity(MACHINE, drawn, 32)
    ours, fifo = (run(policy, MACHINE, PRESETS["chat"], drawn, rate, 1, max_batch=32) for policy in (Headrace, Policy))
    assert percentile(waits(ours, "chat"), 50) < percentile(waits(fifo, "chat"), 50)
    for workload in WORKLOADS:
        assert len(waits(ours, workload)) > 0.6 * sum(lengths.workload == workload for lengths in drawn)


def test_the_capacity_is_where_the_queue_begins_to_grow() -> None:
    drawn = draw_lengths(["chat"], 200, seed=4)
    most = capacity(MACHINE, drawn, rows=32)
    calm, full = (run(Headrace, MACHINE, TUNED, drawn, load * most, 1, max_batch=32) for load in (0.5, 3.0))
    assert percentile(waits(calm, "chat"), 90) < 1.0 < percentile(waits(full, "chat"), 50)
    assert len(full.ended) / full.seconds == pytest.approx(most, rel=0.25)


def test_rooflines_are_those_of_the_memory() -> None:
    machine = MACHINES["h200-8b"]
    assert machine.seconds(1, 0, 0) == pytest.approx(3.7e-3 + 0.3e-3, rel=0.03)
    assert machine.seconds(0, 0, 256 * 1000) - machine.base == pytest.approx(7.6e-3, rel=0.03)
    assert machine.kv_tokens > 700_000


def test_lines_show_every_class() -> None:
    trace = run(Headrace, MACHINE, TUNED, MIXED, 1.0, 1)
    shown = lines("1x", "headrace", trace)
    assert [line[2] for line in shown] == list(WORKLOADS)
    assert sum(int(line[3].split("/")[0]) for line in shown) == len(MIXED)


def test_decoding_begins_with_the_first_token() -> None:
    request = Running(Lengths("chat", 0, 0, 1, 5), 0, 0.0)
    assert not request.decoding
    request.computed, request.said = 1, 1
    assert request.decoding
