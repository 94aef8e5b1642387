"""How many prompts a shard is given: by what it computes in a moment, by priority, and never too few to go on."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_router.prompts import MOMENT, Prompts


@dataclass(eq=False)
class Item:
    begun: bool = False


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def learnt(clock: Clock) -> Prompts[Item]:
    """A shard that has computed 1,000 tokens in a second."""
    prompts: Prompts[Item] = Prompts(clock)
    item = Item()
    prompts.add(item, 1000, 0)
    clock.now, item.begun = clock.now + 1.0, True
    prompts.step()
    return prompts


def test_nothing_is_held_back_before_a_rate_is_known() -> None:
    prompts: Prompts[Item] = Prompts(Clock())
    for _ in range(50):
        assert prompts.may_add(0)
        prompts.add(Item(), 4000, 0)


def test_a_shard_gets_what_it_computes_in_a_moment() -> None:
    prompts = learnt(Clock())
    given = 0
    while prompts.may_add(1):
        prompts.add(Item(), 50, 1)
        given += 50
    assert given == MOMENT * 1000
    assert not prompts.may_add(0)
    assert prompts.may_add(2)  # lower ones do not hold up the urgent


def test_there_is_always_a_next_one() -> None:
    prompts = learnt(Clock())
    first = Item()
    prompts.add(first, 100_000, 1)
    assert prompts.may_add(1)
    prompts.add(Item(), 100_000, 1)
    assert not prompts.may_add(1)
    prompts.remove(first)
    assert prompts.may_add(1)


def test_who_has_begun_counts_no_more_and_the_rate_follows() -> None:
    clock = Clock()
    prompts = learnt(clock)
    items = [Item() for _ in range(10)]
    for item in items:
        prompts.add(item, 1000, 0)
    assert not prompts.may_add(0)
    for item in items:
        clock.now += 10.0  # ten times as slow as before
        item.begun = True
        prompts.step()
    given = 0
    while prompts.may_add(0):
        prompts.add(Item(), 10, 0)
        given += 10
    assert 20 <= given < 500
