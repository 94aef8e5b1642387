"""The queue: order, heads, and requests that end while they wait."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from headrace_router.queue import RequestQueue
from headrace_router.tenants import CLASSES


@dataclass(eq=False)
class Item:
    arrival: int
    workload: str = "chat"
    ended: bool = False


operations = st.lists(st.one_of(
    st.tuples(st.just("push"), st.sampled_from(CLASSES)),
    st.tuples(st.just("take"), st.integers(1, 3)),
    st.tuples(st.just("back"), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 20)),
), max_size=60)


@given(operations)
def test_nothing_is_lost_doubled_or_reordered(steps: list[tuple[str, object]]) -> None:
    queue: RequestQueue[Item] = RequestQueue()
    waiting: list[Item] = []
    taken: list[Item] = []
    for arrival, (what, value) in enumerate(steps):
        if what == "push":
            item = Item(arrival, str(value))
            queue.push(item)
            waiting.append(item)
        elif what == "take":
            got = queue.take(int(str(value)))
            assert len(got) == min(int(str(value)), len(waiting))
            for item in got:
                waiting.remove(item)
            for name in CLASSES:
                order = [i.arrival for i in got if i.workload == name]
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
            queue.forget()
        assert len(queue) == len(waiting)
        assert {id(i) for i in queue} == {id(i) for i in waiting}


def test_classes_and_heads() -> None:
    queue: RequestQueue[Item] = RequestQueue()
    items = [Item(0, "document"), Item(1, "agent"), Item(2, "chat"), Item(3, "chat")]
    for item in items:
        queue.push(item)
    first = queue.take(2)
    assert [i.arrival for i in first] == [2, 3]
    queue.push_head(reversed(first))
    assert [i.arrival for i in queue.take(9)] == [2, 3, 1, 0]


def test_an_empty_queue_holds_no_ended_requests() -> None:
    queue: RequestQueue[Item] = RequestQueue()
    item = Item(0)
    queue.push(item)
    item.ended = True
    queue.forget()
    assert len(queue) == 0
    assert queue.take(5) == []
    fresh = Item(1)
    queue.push(fresh)
    assert (len(queue), queue.take(5)) == (1, [fresh])


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    queue: RequestQueue[Item] = RequestQueue()
    items = [Item(n, workload) for n, workload in enumerate(("document", "chat", "chat", "agent"))]
    for item in items:
        queue.push(item)
    assert [i.arrival for i in queue.take(9, lambda item: item.arrival != 2)] == [1]
    assert len(queue) == 3
    assert [i.arrival for i in queue.take(9)] == [2, 3, 0]


def test_what_has_ended_is_not_asked_whether_it_fits() -> None:
    queue: RequestQueue[Item] = RequestQueue()
    items = [Item(0), Item(1)]
    for item in items:
        queue.push(item)
    items[0].ended = True
    queue.forget()
    assert queue.take(2, lambda item: item is items[1]) == [items[1]]
    assert len(queue) == 0
