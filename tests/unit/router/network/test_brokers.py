"""Every broker against a plain model: any sequence of transitions, and the invariants that must hold after each."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headrace._common.errors import Conflict, NotFound, QueueFull
from headrace_router.network.jobs import (
    BEGINNING,
    OPEN,
    OWNER,
    PROBATION,
    TERMINAL,
    TRUSTED,
    Event,
    Holder,
    Job,
    Policy,
    Progress,
)
from headrace_router.types import End, GenerateRequest, Token
from tests.fakes.brokers import KINDS, Brokers, Valkey

SESSIONS = {"a": 0, "b": 0, "c": 1}  # and the gateway that each is connected to
END = End("eos_token", "", 0, 1, None, 0, 0.0, 0.0)
POLICY = Policy(max_queue_size=4, max_queue_time=50, max_run_time=100, lease=10, stall=5, max_attempts=3, prompt_token=0)


def tokens(*ids: int) -> list[Token]:
    return [Token(i, -0.5, "x", False) for i in ids]


def job(name: str, flow: str = "t", weight: float = 1.0, most: int = 8) -> Job:
    return Job(name, flow, weight, GenerateRequest([1, 2, 3], most))


def ignore(*what: Any) -> None:
    """What a session does that is told to stop."""


async def wait_for(heard: list[Event], count: int) -> None:
    async with asyncio.timeout(5):
        while len(heard) < count:  # noqa: ASYNC110 - what a reader has heard so far
            await asyncio.sleep(0.001)


async def heard_all(heard: list[Event], expected: list[Event]) -> None:
    """News may take a while to go from one gateway to another."""
    async with asyncio.timeout(5):
        while heard != expected:  # noqa: ASYNC110 - what a reader has heard so far
            await asyncio.sleep(0.001)


@dataclass
class Model:
    """What must be true of one job."""

    state: str = "queued"
    attempt: int = 0
    session: str | None = None
    output: list[int] = field(default_factory=list)
    heard: list[list[Event]] = field(default_factory=lambda: [[], []])  # by a reader at each gateway
    checked: bool = False  # after its end


class BrokerMachine(RuleBasedStateMachine):
    """Random clients and workers at two gateways, zombies among them."""

    def __init__(self, brokers: Brokers) -> None:
        super().__init__()
        self.run, self.clock = brokers.run, brokers.clock
        self.clock.now = 0.0
        self.brokers = brokers
        self.gateways = brokers.make(POLICY, 2)
        self.broker = self.gateways[0]
        self.jobs: dict[str, Model] = {}
        for session in SESSIONS:
            self.attach(session)

    def teardown(self) -> None:
        self.brokers.drop(self.gateways)

    def attach(self, session: str) -> None:
        self.run(self.gateways[SESSIONS[session]].attach(Holder(session, "f32", 100), ignore))

    def lose(self, model: Model) -> None:
        model.session = None
        model.state = "failed" if model.attempt >= POLICY.max_attempts else "queued"

    def current(self, model: Model, attempt: int) -> bool:
        return model.state == "leased" and model.attempt == attempt

    @rule(place=st.integers(0, 1))
    def submit(self, place: int) -> None:
        name = f"j{len(self.jobs)}"
        queued = sum(m.state == "queued" for m in self.jobs.values())
        if queued >= POLICY.max_queue_size:
            with pytest.raises(QueueFull):
                self.run(self.gateways[place].submit(job(name)))
            assert self.run(self.broker.status(name)) is None
            return
        self.run(self.gateways[place].submit(job(name)))
        model = self.jobs[name] = Model()
        for gateway, heard in zip(self.gateways, model.heard, strict=True):
            self.run(gateway.subscribe(name, BEGINNING, heard.extend))

    @rule(session=st.sampled_from(sorted(SESSIONS)), most=st.integers(1, 3))
    def lease(self, session: str, most: int) -> None:
        for lease in self.run(self.gateways[SESSIONS[session]].lease(session, most)):
            model = self.jobs[lease.job.id]
            assert model.state == "queued"
            assert lease.attempt == model.attempt + 1
            assert list(lease.generated) == model.output
            model.state, model.session, model.attempt = "leased", session, lease.attempt

    @precondition(lambda self: self.jobs)
    @rule(
        place=st.integers(0, 1), data=st.data(), back=st.integers(0, 2), offset=st.integers(-2, 1), count=st.integers(0, 3),
        ends=st.booleans(),
    )
    def progress(self, place: int, data: st.DataObject, back: int, offset: int, count: int, ends: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        model = self.jobs[name]
        attempt, index = model.attempt - back, max(len(model.output) + offset, 0)
        ids = [100 + index + k for k in range(count)]
        news = Progress(name, attempt, index, tokens(*ids), END if ends else None)
        [taken] = self.run(self.gateways[place].progress([news]))
        assert taken == (self.current(model, attempt) and index <= len(model.output))
        if not self.current(model, attempt):
            return
        if index > len(model.output):
            self.lose(model)
            return
        model.output += ids[len(model.output) - index :]
        if ends:
            model.state, model.session = "done", None

    @precondition(lambda self: self.jobs)
    @rule(place=st.integers(0, 1), data=st.data(), back=st.integers(0, 1), how=st.sampled_from(["release", "fail", "cancel"]))
    def leave(self, place: int, data: st.DataObject, back: int, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        model = self.jobs[name]
        attempt = model.attempt - back
        if how == "cancel":
            live = model.state not in TERMINAL
            assert self.run(self.gateways[place].cancel(name, "user")) == live
            if live:
                model.state, model.session = "cancelled", None
        elif how == "release":
            assert self.run(self.gateways[place].release(name, attempt, "nack")) == self.current(model, attempt)
            if self.current(model, attempt):
                self.lose(model)
        else:
            assert self.run(self.gateways[place].fail(name, attempt, "oom", "no room")) == self.current(model, attempt)
            if self.current(model, attempt):
                model.state, model.session = "failed", None

    @rule(session=st.sampled_from(sorted(SESSIONS)))
    def reconnect(self, session: str) -> None:
        self.run(self.gateways[SESSIONS[session]].detach(session, "closed"))
        for model in self.jobs.values():
            if model.session == session:
                self.lose(model)
        self.attach(session)

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        for gateway in self.gateways:
            self.run(gateway.sweep())
        for name, model in self.jobs.items():
            status = self.run(self.broker.status(name))
            assert status is not None
            if model.state not in TERMINAL and status.state != model.state:
                assert status.state in ("queued", "expired", "failed")
                model.state, model.session = status.state, None

    @invariant()
    def all_is_well(self) -> None:
        self.run(self.check())

    async def check(self) -> None:
        names = [name for name, model in self.jobs.items() if not model.checked]
        positions = await asyncio.gather(*(self.check_job(name, self.jobs[name]) for name in names))
        waiting = [position for position in positions if position is not None]
        assert sorted(waiting) == list(range(len(waiting)))
        states = [model.state for model in self.jobs.values()]
        live = sum(state not in TERMINAL for state in states)
        for gateway in self.gateways:
            assert await gateway.live("anonymous") == live
            assert gateway.waiting == states.count("queued") == len(waiting)
            assert gateway.leased == states.count("leased")

    async def check_job(self, name: str, model: Model) -> int | None:
        """A job's log is whole, and every reader hears it; returns its position."""
        status = await self.gateways[0].status(name)
        assert status is not None
        assert (status.state, status.attempt, status.tokens) == (model.state, model.attempt, len(model.output))
        log: list[Event] = []
        (await self.gateways[1].subscribe(name, BEGINNING, log.extend))()
        assert [event.index for event in log if event.kind == "token"] == list(range(len(model.output)))
        assert [event.token.id for event in log if event.token is not None] == model.output
        assert [event.seq for event in log] == list(range(len(log)))
        ends = [event.kind for event in log if event.kind in TERMINAL]
        assert ends == ([model.state] if model.state in TERMINAL else [])
        assert not ends or log[-1].kind == ends[0]
        assert sum(event.kind in ("started", "resumed") for event in log) == model.attempt <= POLICY.max_attempts
        for heard in model.heard:
            await heard_all(heard, log)
        rest: list[Event] = []
        if log:
            (await self.gateways[0].subscribe(name, log[len(log) // 2].id, rest.extend))()
        assert rest == log[len(log) // 2 + 1 :]
        model.checked = bool(ends)
        position: int | None = status.position
        return position


@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_of_transitions(kind: str, valkey: Valkey) -> None:
    brokers = Brokers(kind, valkey.url)
    examples = settings(
        max_examples=25, stateful_step_count=50, deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    try:
        run_state_machine_as_test(lambda: BrokerMachine(brokers), settings=examples)  # type: ignore[arg-type]
    finally:
        brokers.close()


def test_a_lost_job_goes_before_later_ones_to_another_worker(brokers: Brokers) -> None:
    run, [broker] = brokers.run, brokers.make(POLICY)
    for session in ("a", "b"):
        run(broker.attach(Holder(session, "f32", 100), ignore))
    for name in ("first", "second"):
        run(broker.submit(job(name)))
    [lease] = run(broker.lease("a", 1))
    run(broker.progress([Progress("first", 1, 0, tokens(7, 8))]))
    assert run(broker.release("first", 1, "oom"))
    assert [lease.job.id for lease in run(broker.lease("a", 1))] == ["second"]
    [again] = run(broker.lease("b", 1))
    assert (again.job.id, again.attempt, again.generated) == ("first", 2, (7, 8))
    assert run(broker.progress([Progress("first", lease.attempt, 2, tokens(9))])) == [False]


def test_a_job_that_only_one_worker_is_left_for_goes_there_again(brokers: Brokers) -> None:
    run, [broker] = brokers.run, brokers.make(POLICY)
    run(broker.attach(Holder("a", "f32", 100), ignore))
    run(broker.submit(job("x")))
    for attempt in (1, 2, 3):
        assert [lease.attempt for lease in run(broker.lease("a", 1))] == [attempt]
        assert run(broker.release("x", attempt, "oom"))
    status = run(broker.status("x"))
    assert status is not None
    assert status.last is not None
    assert status.last.facts["code"] == "attempts_exhausted"


def test_a_job_goes_on_only_in_the_format_that_it_began_in(brokers: Brokers) -> None:
    run, [broker] = brokers.run, brokers.make(POLICY)
    run(broker.attach(Holder("a", "f32", 100), ignore))
    run(broker.submit(job("x")))
    run(broker.lease("a", 1))
    run(broker.progress([Progress("x", 1, 0, tokens(7))]))
    run(broker.attach(Holder("int8", "int8", 100), ignore))
    run(broker.attach(Holder("small", "f32", 10), ignore))
    run(broker.detach("a", "closed"))
    assert not run(broker.lease("int8", 1))
    assert not run(broker.lease("small", 1))
    run(broker.attach(Holder("b", "f32", 100), ignore))
    assert run(broker.lease("b", 1))


def test_a_job_begins_again_where_nobody_can_go_on_exactly(brokers: Brokers) -> None:
    run, [broker], heard = brokers.run, brokers.make(POLICY), list[Event]()
    run(broker.attach(Holder("text", "text", 100, features=frozenset(), resumes=False), ignore))
    run(broker.submit(job("x")))
    run(broker.subscribe("x", BEGINNING, heard.extend))
    run(broker.lease("text", 1))
    run(broker.progress([Progress("x", 1, 0, tokens(7))]))
    run(broker.detach("text", "closed"))
    run(broker.attach(Holder("a", "f32", 100), ignore))
    [lease] = run(broker.lease("a", 1))
    assert lease.generated == ()
    assert run(broker.progress([Progress("x", 2, 0, tokens(8, 9))]))
    run(broker.detach("a", "closed"))
    run(broker.attach(Holder("int8", "int8", 100), ignore))
    assert not run(broker.lease("int8", 1))
    run(broker.attach(Holder("more", "text", 100, features=frozenset(), resumes=False), ignore))
    [lease] = run(broker.lease("more", 1))
    assert lease.generated == ()
    run(wait_for(heard, 6))
    assert [e.kind for e in heard] == ["started", "token", "reset", "token", "token", "reset"]
    assert [e.index for e in heard if e.kind == "token"] == [0, 0, 1]


def test_a_worker_gets_what_it_is_trusted_with_and_has_the_features_for(brokers: Brokers) -> None:
    run, [broker] = brokers.run, brokers.make(POLICY)
    run(broker.attach(Holder("open", "f32", 100, tier=OPEN), ignore))
    run(broker.attach(Holder("text", "text", 100, features=frozenset({"top_k"})), ignore))
    request = GenerateRequest([1, 2, 3], 8)
    run(broker.submit(Job("grammar", "t", 1.0, request, needs=frozenset({"grammar"}))))
    run(broker.submit(Job("top_k", "t", 1.0, request, needs=frozenset({"top_k"}))))
    assert not run(broker.lease("open", 2))
    assert [lease.job.id for lease in run(broker.lease("text", 2))] == ["top_k"]
    run(broker.submit(Job("any", "t", 1.0, request, min_tier=OPEN)))
    assert [lease.job.id for lease in run(broker.lease("open", 2))] == ["any"]
    run(broker.attach(Holder("owner", "f32", 100, tier=OWNER), ignore))
    assert [lease.job.id for lease in run(broker.lease("owner", 2))] == ["grammar"]


def test_a_probe_goes_to_whom_it_is_for_who_gets_more_once_it_is_trusted(brokers: Brokers) -> None:
    run, [broker] = brokers.run, brokers.make(POLICY)
    for session in ("a", "stranger"):
        tier = PROBATION if session == "stranger" else TRUSTED
        run(broker.attach(Holder(session, "f32", 100, tier=tier), ignore))
    run(broker.submit(Job("probe", "t", 1.0, GenerateRequest([1], 8), only="stranger")))
    run(broker.submit(Job("real", "t", 1.0, GenerateRequest([1], 8), min_tier=OPEN)))
    assert [lease.job.id for lease in run(broker.lease("a", 1))] == ["real"]
    assert run(broker.release("real", 1, "nack"))
    assert [lease.job.id for lease in run(broker.lease("stranger", 2))] == ["probe"]
    run(broker.attach(Holder("stranger", "f32", 100, tier=OPEN), ignore))
    assert [lease.job.id for lease in run(broker.lease("stranger", 2))] == ["real"]
    assert broker.leased == 2


def test_time_ends_leases_and_jobs(brokers: Brokers) -> None:
    clock, revoked, kept = brokers.clock, [], 0.05
    run, [broker] = brokers.run, brokers.make(replace(POLICY, retention=kept))
    run(broker.attach(Holder("a", "f32", 100), lambda *what: revoked.append(what)))
    run(broker.submit(job("x")))
    run(broker.lease("a", 1))
    clock.now = 9
    run(broker.renew("a", [("x", 1)]))
    clock.now = 18
    run(broker.sweep())
    assert not revoked
    clock.now = 19
    run(broker.sweep())
    assert revoked == [("x", 1, "stale")]
    clock.now = 101
    run(broker.sweep())
    status = run(broker.status("x"))
    assert status is not None
    assert status.state == "expired"
    clock.now += kept
    time.sleep(kept * 1.5)  # a server's keys expire by its own time
    run(broker.sweep())
    assert run(broker.status("x")) is None
    with pytest.raises(NotFound):
        run(broker.subscribe("x", BEGINNING, ignore))


def test_flows_share_by_weight(brokers: Brokers) -> None:
    run, [broker] = brokers.run, brokers.make(Policy(max_queue_size=100))
    run(broker.attach(Holder("a", "f32", 100), ignore))
    for number in range(12):
        run(broker.submit(job(f"heavy{number}", "heavy")))
    for number in range(12):
        run(broker.submit(job(f"light{number}", "light", weight=2.0)))
    first = [lease.job.flow for lease in run(broker.lease("a", 9))]
    assert first.count("light") == 2 * first.count("heavy")


def test_a_worker_gets_no_more_than_it_has_room_for(brokers: Brokers) -> None:
    run, [broker] = brokers.run, brokers.make(POLICY)
    run(broker.attach(Holder("a", "f32", 100), ignore))
    for name, most in (("long", 17), ("x", 8), ("y", 8)):
        run(broker.submit(job(name, most=most)))
    assert not run(broker.lease("a", 3, tokens=19))  # the long one is next, and nobody passes it by
    assert [lease.job.id for lease in run(broker.lease("a", 3, tokens=35))] == ["long", "x"]
    assert broker.waiting_tokens == 11


def test_the_queue_is_full_by_tokens_too(brokers: Brokers) -> None:
    run, [broker] = brokers.run, brokers.make(Policy(max_queue_size=9, max_queue_tokens=30))
    run(broker.submit(job("alone", most=50)))
    with pytest.raises(QueueFull):
        run(broker.submit(job("x")))
    assert run(broker.cancel("alone", "user"))
    for name in "xy":
        run(broker.submit(job(name)))
    with pytest.raises(QueueFull):
        run(broker.submit(job("z")))
    assert run(broker.status("z")) is None
    assert broker.waiting_tokens == 22


def test_only_what_no_worker_has_had_can_be_refused(brokers: Brokers) -> None:
    run, [broker] = brokers.run, brokers.make(POLICY)
    run(broker.attach(Holder("a", "f32", 100), ignore))
    run(broker.submit(job("x")))
    run(broker.lease("a", 1))
    run(broker.release("x", 1, "nack"))
    run(broker.submit(job("y")))
    assert [run(broker.refuse(name, "no_capacity", "nobody")) for name in ("x", "y", "z")] == [False, True, False]
    status = run(broker.status("y"))
    assert status is not None
    assert status.last is not None
    assert status.last.facts == {"code": "no_capacity", "message": "nobody", "retriable": True}


def test_a_silent_gateway_loses_what_its_workers_hold_and_is_welcome_again(valkey: Valkey) -> None:
    brokers, told = Brokers("shared", valkey.url), list[Any]()
    run, (alive, silent) = brokers.run, brokers.make(POLICY, 2)
    run(alive.attach(Holder("a", "f32", 100), ignore))
    run(silent.attach(Holder("b", "f32", 100), lambda *what: told.append(what)))
    run(silent.submit(job("x")))
    run(silent.lease("b", 1))
    run(silent.progress([Progress("x", 1, 0, tokens(7))]))
    brokers.clock.now = 4
    run(alive.sweep())
    assert not run(alive.lease("a", 1))
    brokers.clock.now = 8
    run(alive.sweep())
    [lease] = run(alive.lease("a", 1))
    assert (lease.job.id, lease.attempt, lease.generated) == ("x", 2, (7,))
    run(alive.submit(job("y")))
    assert [lease.job.id for lease in run(silent.lease("b", 1))] == ["y"]
    assert told == [("x", 1, "stale")]
    assert run(silent.progress([Progress("x", 1, 1, tokens(8))])) == [False]
    brokers.close()


def test_a_key_leads_to_one_request(brokers: Brokers) -> None:
    run, (one, other) = brokers.run, brokers.make(replace(POLICY, retention=0.05), 2)
    assert run(one.claim("k", "body")) is None
    with pytest.raises(Conflict):
        run(other.claim("k", "another body"))

    async def both() -> list[str | None]:
        return list(await asyncio.gather(other.claim("k", "body"), one.settle("k", "x")))

    run(one.submit(job("x")))
    assert run(both()) == ["x", None]
    run(one.cancel("x", "user"))
    assert run(other.claim("k", "body")) == "x"
    brokers.clock.now += 0.1
    time.sleep(0.1)
    run(one.sweep())
    assert run(other.claim("k", "another body")) is None
    run(other.settle("k", None))
    assert run(one.claim("k", "body")) is None
