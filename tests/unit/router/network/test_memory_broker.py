"""The broker in memory against a plain model: any sequence of transitions, and the invariants that must hold after each."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace._common.errors import NotFound, QueueFull
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
from headrace_router.network.memory import MemoryBroker
from headrace_router.types import End, GenerateRequest, Token

T = TypeVar("T")

SESSIONS = ("a", "b", "c")
END = End("eos_token", "", 0, 1, None, 0, 0.0, 0.0)
POLICY = Policy(max_queue_size=4, max_queue_time=50, max_run_time=100, lease=10, stall=5, max_attempts=3, prompt_token=0)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def tokens(*ids: int) -> list[Token]:
    return [Token(i, -0.5, "x", False) for i in ids]


def job(name: str, flow: str = "t", weight: float = 1.0, most: int = 8) -> Job:
    return Job(name, flow, weight, GenerateRequest([1, 2, 3], most))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Model:
    """What must be true of one job."""

    state: str = "queued"
    attempt: int = 0
    session: str | None = None
    output: list[int] = field(default_factory=list)
    heard: list[Event] = field(default_factory=list)


class BrokerMachine(RuleBasedStateMachine):
    """Random clients and workers, zombies among them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.broker = MemoryBroker(POLICY, self.clock)
        self.jobs: dict[str, Model] = {}
        self.revoked: list[tuple[str, int, str]] = []
        for session in SESSIONS:
            self.attach(session)

    def attach(self, session: str) -> None:
        run(self.broker.attach(Holder(session, "f32", 100), lambda *what: self.revoked.append(what)))

    def lose(self, model: Model) -> None:
        model.session = None
        model.state = "failed" if model.attempt >= POLICY.max_attempts else "queued"

    def current(self, model: Model, attempt: int) -> bool:
        return model.state == "leased" and model.attempt == attempt

    @rule()
    def submit(self) -> None:
        name = f"j{len(self.jobs)}"
        queued = sum(m.state == "queued" for m in self.jobs.values())
        if queued >= POLICY.max_queue_size:
            with pytest.raises(QueueFull):
                run(self.broker.submit(job(name)))
            assert run(self.broker.status(name)) is None
            return
        run(self.broker.submit(job(name)))
        self.jobs[name] = Model()
        run(self.broker.subscribe(name, BEGINNING, self.jobs[name].heard.extend))

    @rule(session=st.sampled_from(SESSIONS), most=st.integers(1, 3))
    def lease(self, session: str, most: int) -> None:
        for lease in run(self.broker.lease(session, most)):
            model = self.jobs[lease.job.id]
            assert model.state == "queued"
            assert lease.attempt == model.attempt + 1
            assert list(lease.generated) == model.output
            model.state, model.session, model.attempt = "leased", session, lease.attempt

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), back=st.integers(0, 2), offset=st.integers(-2, 1), count=st.integers(0, 3), ends=st.booleans())
    def progress(self, data: st.DataObject, back: int, offset: int, count: int, ends: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        model = self.jobs[name]
        attempt, index = model.attempt - back, max(len(model.output) + offset, 0)
        ids = [100 + index + k for k in range(count)]
        news = Progress(name, attempt, index, tokens(*ids), END if ends else None)
        [taken] = run(self.broker.progress([news]))
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
    @rule(data=st.data(), back=st.integers(0, 1), how=st.sampled_from(["release", "fail", "cancel"]))
    def leave(self, data: st.DataObject, back: int, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        model = self.jobs[name]
        attempt = model.attempt - back
        if how == "cancel":
            live = model.state not in TERMINAL
            assert run(self.broker.cancel(name, "user")) == live
            if live:
                model.state, model.session = "cancelled", None
        elif how == "release":
            assert run(self.broker.release(name, attempt, "nack")) == self.current(model, attempt)
            if self.current(model, attempt):
                self.lose(model)
        else:
            assert run(self.broker.fail(name, attempt, "oom", "no room")) == self.current(model, attempt)
            if self.current(model, attempt):
                model.state, model.session = "failed", None

    @rule(session=st.sampled_from(SESSIONS))
    def reconnect(self, session: str) -> None:
        run(self.broker.detach(session, "closed"))
        for model in self.jobs.values():
            if model.session == session:
                self.lose(model)
        self.attach(session)

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        run(self.broker.sweep())
        for name, model in self.jobs.items():
            status = run(self.broker.status(name))
            assert status is not None
            if model.state not in TERMINAL and status.state != model.state:
                assert status.state in ("queued", "expired", "failed")
                model.state, model.session = status.state, None

    @invariant()
    def logs_are_whole(self) -> None:
        for name, model in self.jobs.items():
            status = run(self.broker.status(name))
            assert status is not None
            assert (status.state, status.attempt, status.tokens) == (model.state, model.attempt, len(model.output))
            told = [event.index for event in model.heard if event.kind == "token"]
            assert told == list(range(len(model.output)))
            assert [e.token.id for e in model.heard if e.token is not None] == model.output
            assert [event.seq for event in model.heard] == list(range(len(model.heard)))
            ends = [event.kind for event in model.heard if event.kind in TERMINAL]
            assert ends == ([model.state] if model.state in TERMINAL else [])
            assert not ends or model.heard[-1].kind == ends[0]
            assert sum(event.kind in ("started", "resumed") for event in model.heard) == model.attempt <= POLICY.max_attempts
            again: list[Event] = []
            run(self.broker.subscribe(name, BEGINNING, again.extend))()
            assert again == model.heard

    @invariant()
    def every_job_is_somewhere(self) -> None:
        states = [model.state for model in self.jobs.values()]
        assert self.broker.waiting == states.count("queued")
        assert self.broker.leased == states.count("leased")
        positions = [run(self.broker.status(n)).position for n, m in self.jobs.items() if m.state == "queued"]  # type: ignore[union-attr]
        assert sorted(positions) == list(range(len(positions)))  # type: ignore[type-var]


TestBroker = BrokerMachine.TestCase
TestBroker.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_a_lost_job_goes_before_later_ones_to_another_worker() -> None:
    broker = MemoryBroker(POLICY, Clock())
    for session in ("a", "b"):
        run(broker.attach(Holder(session, "f32", 100), lambda *what: None))
    for name in ("first", "second"):
        run(broker.submit(job(name)))
    [lease] = run(broker.lease("a", 1))
    run(broker.progress([Progress("first", 1, 0, tokens(7, 8))]))
    assert run(broker.release("first", 1, "oom"))
    assert [lease.job.id for lease in run(broker.lease("a", 1))] == ["second"]
    [again] = run(broker.lease("b", 1))
    assert (again.job.id, again.attempt, again.generated) == ("first", 2, (7, 8))
    assert run(broker.progress([Progress("first", lease.attempt, 2, tokens(9))])) == [False]


def test_a_job_that_only_one_worker_is_left_for_goes_there_again() -> None:
    broker = MemoryBroker(POLICY, Clock())
    run(broker.attach(Holder("a", "f32", 100), lambda *what: None))
    run(broker.submit(job("x")))
    for attempt in (1, 2, 3):
        assert [lease.attempt for lease in run(broker.lease("a", 1))] == [attempt]
        assert run(broker.release("x", attempt, "oom"))
    status = run(broker.status("x"))
    assert status is not None
    assert status.last is not None
    assert status.last.facts["code"] == "attempts_exhausted"


def test_a_job_goes_on_only_in_the_format_that_it_began_in() -> None:
    broker = MemoryBroker(POLICY, Clock())
    run(broker.attach(Holder("a", "f32", 100), lambda *what: None))
    run(broker.submit(job("x")))
    run(broker.lease("a", 1))
    run(broker.progress([Progress("x", 1, 0, tokens(7))]))
    run(broker.attach(Holder("int8", "int8", 100), lambda *what: None))
    run(broker.attach(Holder("small", "f32", 10), lambda *what: None))
    run(broker.detach("a", "closed"))
    assert not run(broker.lease("int8", 1))
    assert not run(broker.lease("small", 1))
    run(broker.attach(Holder("b", "f32", 100), lambda *what: None))
    assert run(broker.lease("b", 1))


def test_a_job_begins_again_where_nobody_can_go_on_exactly() -> None:
    broker, heard = MemoryBroker(POLICY, Clock()), list[Event]()
    run(broker.attach(Holder("text", "text", 100, features=frozenset(), resumes=False), lambda *what: None))
    run(broker.submit(job("x")))
    run(broker.subscribe("x", BEGINNING, heard.extend))
    run(broker.lease("text", 1))
    run(broker.progress([Progress("x", 1, 0, tokens(7))]))
    run(broker.detach("text", "closed"))
    run(broker.attach(Holder("a", "f32", 100), lambda *what: None))
    [lease] = run(broker.lease("a", 1))
    assert lease.generated == ()
    assert run(broker.progress([Progress("x", 2, 0, tokens(8, 9))])) == [True]
    run(broker.detach("a", "closed"))
    run(broker.attach(Holder("int8", "int8", 100), lambda *what: None))
    assert not run(broker.lease("int8", 1))
    run(broker.attach(Holder("more", "text", 100, features=frozenset(), resumes=False), lambda *what: None))
    [lease] = run(broker.lease("more", 1))
    assert lease.generated == ()
    assert [e.kind for e in heard] == ["started", "token", "reset", "token", "token", "reset"]
    assert [e.index for e in heard if e.kind == "token"] == [0, 0, 1]


def test_a_worker_gets_what_it_is_trusted_with_and_has_the_features_for() -> None:
    broker = MemoryBroker(POLICY, Clock())
    run(broker.attach(Holder("open", "f32", 100, tier=OPEN), lambda *what: None))
    run(broker.attach(Holder("text", "text", 100, features=frozenset({"top_k"})), lambda *what: None))
    request = GenerateRequest([1, 2, 3], 8)
    run(broker.submit(Job("grammar", "t", 1.0, request, needs=frozenset({"grammar"}))))
    run(broker.submit(Job("top_k", "t", 1.0, request, needs=frozenset({"top_k"}))))
    assert not run(broker.lease("open", 2))
    assert [lease.job.id for lease in run(broker.lease("text", 2))] == ["top_k"]
    run(broker.submit(Job("any", "t", 1.0, request, min_tier=OPEN)))
    assert [lease.job.id for lease in run(broker.lease("open", 2))] == ["any"]
    run(broker.attach(Holder("owner", "f32", 100, tier=OWNER), lambda *what: None))
    assert [lease.job.id for lease in run(broker.lease("owner", 2))] == ["grammar"]


def test_a_probe_goes_to_whom_it_is_for_who_gets_more_once_it_is_trusted() -> None:
    broker = MemoryBroker(POLICY, Clock())
    for session in ("a", "stranger"):
        tier = PROBATION if session == "stranger" else TRUSTED
        run(broker.attach(Holder(session, "f32", 100, tier=tier), lambda *what: None))
    run(broker.submit(Job("probe", "t", 1.0, GenerateRequest([1], 8), only="stranger")))
    run(broker.submit(Job("real", "t", 1.0, GenerateRequest([1], 8), min_tier=OPEN)))
    assert [lease.job.id for lease in run(broker.lease("a", 1))] == ["real"]
    assert run(broker.release("real", 1, "nack"))
    assert [lease.job.id for lease in run(broker.lease("stranger", 2))] == ["probe"]
    run(broker.attach(Holder("stranger", "f32", 100, tier=OPEN), lambda *what: None))
    assert [lease.job.id for lease in run(broker.lease("stranger", 2))] == ["real"]
    assert broker.leased == 2


def test_time_ends_leases_and_jobs() -> None:
    clock, revoked = Clock(), []
    broker = MemoryBroker(POLICY, clock)
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
    clock.now = 101 + POLICY.retention
    run(broker.sweep())
    assert run(broker.status("x")) is None
    with pytest.raises(NotFound):
        run(broker.subscribe("x", BEGINNING, lambda events: None))


def test_flows_share_by_weight() -> None:
    broker = MemoryBroker(Policy(max_queue_size=100), Clock())
    run(broker.attach(Holder("a", "f32", 100), lambda *what: None))
    for number in range(12):
        run(broker.submit(job(f"heavy{number}", "heavy")))
    for number in range(12):
        run(broker.submit(job(f"light{number}", "light", weight=2.0)))
    first = [lease.job.flow for lease in run(broker.lease("a", 9))]
    assert first.count("light") == 2 * first.count("heavy")


def test_a_worker_gets_no_more_than_it_has_room_for() -> None:
    broker = MemoryBroker(POLICY, Clock())
    run(broker.attach(Holder("a", "f32", 100), lambda *what: None))
    for name, most in (("long", 17), ("x", 8), ("y", 8)):
        run(broker.submit(job(name, most=most)))
    assert not run(broker.lease("a", 3, tokens=19))  # the long one is next, and nobody passes it by
    assert [lease.job.id for lease in run(broker.lease("a", 3, tokens=35))] == ["long", "x"]
    assert broker.waiting_tokens == 11


def test_the_queue_is_full_by_tokens_too() -> None:
    broker = MemoryBroker(Policy(max_queue_size=9, max_queue_tokens=30), Clock())
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


def test_only_what_no_worker_has_had_can_be_refused() -> None:
    broker = MemoryBroker(POLICY, Clock())
    run(broker.attach(Holder("a", "f32", 100), lambda *what: None))
    run(broker.submit(job("x")))
    run(broker.lease("a", 1))
    run(broker.release("x", 1, "nack"))
    run(broker.submit(job("y")))
    assert [run(broker.refuse(name, "no_capacity", "nobody")) for name in ("x", "y", "z")] == [False, True, False]
    status = run(broker.status("y"))
    assert status is not None
    assert status.last is not None
    assert status.last.facts == {"code": "no_capacity", "message": "nobody", "retriable": True}
