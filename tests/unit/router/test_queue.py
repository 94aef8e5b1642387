"""The queue: order of classes and tenants, heads, bounded passing, and requests that end while they wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router.queue import PASSES, PATIENCE, RequestQueue
from headrace_router.tenants import CLASSES, Tenant

SOMEONE = Tenant("someone")
TENANTS = (SOMEONE, Tenant("other"), Tenant("heavy", weight=3.0))


@dataclass(eq=False)
class Item:
    arrival: int
    workload: str = "chat"
    tenant: Tenant = SOMEONE
    cost: int = 100
    ended: bool = False
    passed: int = 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


operations = st.lists(st.one_of(
    st.tuples(st.just("push"), st.sampled_from(CLASSES), st.sampled_from(TENANTS)),
    st.tuples(st.just("take"), st.integers(1, 3), st.integers(0, 3)),
    st.tuples(st.just("back"), st.integers(0, 5), st.none()),
    st.tuples(st.just("end"), st.integers(0, 20), st.none()),
    st.tuples(st.just("wait"), st.integers(1, 20), st.none()),
), max_size=60)


@given(operations)
def test_nothing_is_lost_doubled_or_reordered(steps: list[tuple[str, object, object]]) -> None:
    """Against a plain list: each take gets what there is, and a tenant's requests of a class keep their order."""
    clock = Clock()
    queue: RequestQueue[Item] = RequestQueue(clock)
    waiting: list[Item] = []
    taken: list[Item] = []
    for arrival, (what, value, more) in enumerate(steps):
        if what == "push":
            assert isinstance(more, Tenant)
            item = Item(arrival, str(value), more)
            queue.push(item)
            waiting.append(item)
        elif what == "take":
            most = int(str(value))
            got = queue.take(most, lambda item, odd=more: item.arrival % 4 != odd)  # type: ignore[misc]
            fitting = [item for item in waiting if item.arrival % 4 != more]
            assert len(got) <= min(most, len(fitting))
            assert got or not fitting or any(item.passed >= PASSES for item in waiting)
            for item in got:
                waiting.remove(item)
            for name in CLASSES:
                for tenant in TENANTS:
                    order = [i.arrival for i in got if i.workload == name and i.tenant is tenant]
                    assert order == sorted(order)
            taken += got
        elif what == "back" and taken:
            back = taken[-int(str(value)):] if value else []
            taken = taken[: len(taken) - len(back)]
            queue.push_head(back)
            waiting += back
        elif what == "end" and waiting:
            item = waiting.pop(int(str(value)) % len(waiting))
            item.ended = True
            queue.forget(item)
        elif what == "wait":
            clock.now += int(str(value))
        assert (len(queue), queue.tokens) == (len(waiting), sum(item.cost for item in waiting))
        assert {id(i) for i in queue} == {id(i) for i in waiting}


def test_urgent_classes_pass_and_heads_come_first() -> None:
    queue: RequestQueue[Item] = RequestQueue(Clock())
    for item in [Item(0, "document"), Item(1, "agent"), Item(2, "chat"), Item(3, "chat")]:
        queue.push(item)
    first = queue.take(2)
    assert [i.arrival for i in first] == [2, 3]
    queue.push_head(reversed(first))
    assert [i.arrival for i in queue.take(9)] == [2, 3, 1, 0]


def test_no_class_waits_for_ever() -> None:
    clock = Clock()
    queue: RequestQueue[Item] = RequestQueue(clock)
    queue.push(Item(0, "document"))
    for second in range(1, 100):
        clock.now = float(second)
        queue.push(Item(second, "chat"))
        if queue.take(1)[0].workload == "document":
            break
    assert second == PATIENCE["document"] + 1


def serve(queue: RequestQueue[Item], count: int, used: float = 1.0) -> Counter[str]:
    got: Counter[str] = Counter()
    for _ in range(count):
        (item,) = queue.take(1)
        queue.refund(item, int(item.cost * used))
        got[item.tenant.name] += 1
    return got


def test_tenants_share_by_weight_and_tokens() -> None:
    queue: RequestQueue[Item] = RequestQueue(Clock())
    for n in range(300):
        queue.push(Item(n, tenant=TENANTS[0]))
    for n in range(300, 600):
        queue.push(Item(n, tenant=TENANTS[2]))
    for n in range(600, 700):
        queue.push(Item(n, tenant=TENANTS[1], cost=400))
    got = serve(queue, 180)
    assert got["heavy"] == pytest.approx(3 * got["someone"], abs=3)
    assert got["someone"] == pytest.approx(4 * got["other"], abs=4)


def test_what_was_not_used_is_given_back() -> None:
    queue: RequestQueue[Item] = RequestQueue(Clock())
    for n in range(200):
        queue.push(Item(n, tenant=TENANTS[0], cost=1000))
        queue.push(Item(n, tenant=TENANTS[1], cost=100))
    got: Counter[str] = Counter()
    for _ in range(100):
        (item,) = queue.take(1)
        queue.refund(item, 100)  # both really use the same
        got[item.tenant.name] += 1
    assert got["someone"] == pytest.approx(got["other"], abs=2)


def test_who_was_away_has_saved_nothing_up() -> None:
    queue: RequestQueue[Item] = RequestQueue(Clock())
    for n in range(300):
        queue.push(Item(n, tenant=TENANTS[0]))
    serve(queue, 100)
    for n in range(300, 400):
        queue.push(Item(n, tenant=TENANTS[1]))
    got = serve(queue, 40)
    assert got["someone"] == pytest.approx(20, abs=1)


def test_a_request_without_room_is_passed_only_so_often() -> None:
    queue: RequestQueue[Item] = RequestQueue(Clock())
    large = Item(0)
    queue.push(large)
    for n in range(1, 40):
        queue.push(Item(n))
    passed = 0
    while got := queue.take(3, lambda item: item is not large):
        passed += len(got)
    assert PASSES <= passed < PASSES + 3
    assert len(queue) == 40 - passed
    assert queue.take(1) == [large]


def test_the_order_of_those_without_room_is_kept() -> None:
    queue: RequestQueue[Item] = RequestQueue(Clock())
    items = [Item(n) for n in range(6)]
    for item in items:
        queue.push(item)
    assert queue.take(9, lambda item: item.arrival in (1, 4)) == [items[1], items[4]]
    assert queue.take(9) == [items[0], items[2], items[3], items[5]]
    assert [i.passed for i in items] == [2, 0, 1, 1, 0, 0]


def test_an_empty_queue_holds_no_ended_requests() -> None:
    queue: RequestQueue[Item] = RequestQueue()
    item = Item(0)
    queue.push(item)
    item.ended = True
    queue.forget(item)
    assert (len(queue), queue.tokens) == (0, 0)
    assert queue.take(5) == []
    fresh = Item(1)
    queue.push(fresh)
    assert (len(queue), queue.take(5)) == (1, [fresh])


def test_what_has_ended_is_not_asked_whether_it_fits() -> None:
    queue: RequestQueue[Item] = RequestQueue()
    items = [Item(0), Item(1)]
    for item in items:
        queue.push(item)
    items[0].ended = True
    queue.forget(items[0])
    assert queue.take(2, lambda item: item is items[1]) == [items[1]]
    assert len(queue) == 0


@pytest.mark.parametrize("seed", range(3))
def test_under_three_times_the_load_every_class_and_tenant_is_served_in_bounded_time(seed: int) -> None:
    """A bounded queue before a server of one request a second: what got in comes out, however much else wants to."""
    draw, clock = Random(seed), Clock()
    queue: RequestQueue[Item] = RequestQueue(clock)
    bound, since, waits = 64, dict[int, float](), dict[tuple[str, str], list[float]]()
    for second in range(1500):
        clock.now = float(second)
        for n in range(3):
            item = Item(3 * second + n, draw.choice(CLASSES), TENANTS[0] if draw.random() < 0.8 else TENANTS[1])
            if len(queue) < bound:
                queue.push(item)
                since[item.arrival] = clock.now
        (taken,) = queue.take(1)
        waits.setdefault((taken.workload, taken.tenant.name), []).append(clock.now - since.pop(taken.arrival))
    assert len(waits) == len(CLASSES) * 2
    assert all(len(served) > 25 for served in waits.values())
    limit = 2 * (bound + max(PATIENCE.values()))  # half of the service is each tenant's
    assert max(max(served) for served in waits.values()) <= limit
    assert all(clock.now - pushed <= limit for pushed in since.values())


def test_who_is_cancelled_after_its_turn_is_charged_for_what_it_used() -> None:
    queue: RequestQueue[Item] = RequestQueue(Clock())
    for n in range(100):
        queue.push(Item(n, tenant=TENANTS[0], cost=1000))
        queue.push(Item(n, tenant=TENANTS[1], cost=100))
    got: Counter[str] = Counter()
    for _ in range(100):
        (item,) = queue.take(1)
        queue.push_head([item])  # preempted
        item.ended = True
        queue.forget(item, 100)
        got[item.tenant.name] += 1
    assert got["someone"] == pytest.approx(got["other"], abs=2)


def test_classes_that_may_not_are_left_out() -> None:
    queue: RequestQueue[Item] = RequestQueue(Clock())
    for item in [Item(0, "chat"), Item(1, "document"), Item(2, "document")]:
        queue.push(item)
    documents: list[int] = []

    def may(workload: str) -> bool:
        return workload == "document" and not documents

    def fits(item: Item) -> bool:
        documents.append(item.arrival)
        return True

    assert [i.arrival for i in queue.take(9, fits, may)] == [1]  # asked again after each
    assert len(queue) == 2
    assert [i.passed for i in queue] == [0, 0]


def test_a_new_request_waits_as_long_as_those_before_it() -> None:
    clock = Clock()
    queue: RequestQueue[Item] = RequestQueue(clock)
    assert queue.wait("chat", SOMEONE) == 0
    for n in range(40):
        queue.push(Item(n, tenant=SOMEONE))
    for _ in range(20):
        clock.now += 2.0
        queue.take(1)
    assert queue.wait("chat", SOMEONE) == pytest.approx(20 * 2.0, rel=0.2)
    assert queue.wait("chat", TENANTS[1]) == pytest.approx(2.0, rel=0.2)  # its turn comes after one of the other's
    assert queue.wait("chat", TENANTS[2]) < 2.0  # three of its own go for each one of the other's
    assert queue.wait("document", SOMEONE) == 0
