"""Claims of actors/adapters/placement.py: who is to hold what, who makes room, and who waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from actors.adapters.entry import Placement
from actors.adapters.placement import HALF_LIFE_S, STAY_S, WAIT_S, Place
from tests.actors.adapters.plans import EVERYWHERE, ON_DEMAND, REPLICAS, W0, W1, W2, Plan

# -- where adapters go -------------------------------------------------------------------------------------------------


def test_everywhere_is_everywhere_and_on_workers_that_come_later() -> None:
    plan = Plan(W0)
    plan.offer("ab", EVERYWHERE)
    plan.enter(W1)

    assert plan.held == {W0: "ab", W1: "ab"}


@pytest.mark.parametrize("before", [1, 3])
def test_replicas_are_as_many_as_said(before: int) -> None:
    plan = Plan(W0, W1, W2)
    plan.offer("abc", REPLICAS, replicas=before)
    plan.offer("abc", REPLICAS, replicas=2)

    assert [len(plan.holders(name)) for name in "abc"] == [2, 2, 2]


def test_replicas_are_spread_over_the_workers() -> None:
    plan = Plan(W0, W1)
    plan.offer("abcd", REPLICAS)

    assert sorted(len(names) for names in plan.held.values()) == [2, 2]


def test_replicas_move_when_a_holder_leaves_and_their_number_stays_when_it_is_back() -> None:
    plan = Plan(W0, W1)
    plan.offer("a", REPLICAS)
    (holder,) = plan.holders("a")
    plan.leave(holder, now_s=1.0)
    (other,) = plan.holders("a")
    plan.join(holder, Place(4, 4), held=["a"], now_s=2.0)
    plan.check()

    assert other != holder
    assert len(plan.holders("a")) == 1


def test_on_demand_is_nowhere_until_it_is_wanted_and_then_once_where_it_is_preferred() -> None:
    plan = Plan(W0, W1)
    plan.offer("a")
    assert plan.held == {W0: "", W1: ""}

    plan.ask("aaa", W1, W0)

    assert (plan.held, plan.waiting) == ({W0: "", W1: "a"}, 0)


def test_a_free_slot_counts_more_than_what_is_preferred() -> None:
    plan = Plan(W0, W1, capacity=4, slots=1)
    plan.offer("ab")
    plan.ask("ab", W0, W1)

    assert plan.held == {W0: "a", W1: "b"}


def test_eight_adapters_on_two_workers_with_four_slots_each_are_split_four_and_four() -> None:
    plan = Plan(W0, W1, capacity=8, slots=4)
    plan.offer("abcdefgh")
    for _ in range(3):
        plan.ask("abcdefgh", W0, W1)
        plan.load()

    assert plan.held == {W0: "abcd", W1: "efgh"}
    assert plan.num_evictions == 0


def test_more_adds_a_holder_up_to_max_replicas() -> None:
    plan = Plan(W0, W1, W2)
    plan.offer("a", max_replicas=2)
    plan.offer("b")
    for _ in range(4):
        plan.ask("ab", W0, W1, W2, more=True)

    assert plan.held == {W0: "ab", W1: "ab", W2: "b"}
    assert plan.waiting == 0


@pytest.mark.parametrize("placement", [EVERYWHERE, REPLICAS])
def test_more_does_not_change_how_many_a_fixed_placement_has(placement: Placement) -> None:
    plan = Plan(W0, W1)
    plan.offer("a", placement)
    before = plan.held

    plan.ask("a", W1, W0, more=True)

    assert (plan.held, plan.waiting) == (before, 0)


def test_on_demand_with_replicas_is_held_by_so_many_once_it_is_wanted() -> None:
    plan = Plan(W0, W1, W2)
    plan.offer("a", replicas=2)
    plan.ask("a", W1)
    plan.settle(now_s=0.0)

    assert len(plan.holders("a")) == 2


# -- room --------------------------------------------------------------------------------------------------------------


def test_the_least_used_adapter_of_all_workers_makes_room() -> None:
    plan = Plan(W0, W1, capacity=2, slots=2)
    plan.offer("abcdx")
    plan.ask("ab", W0)
    plan.ask("cd", W1)
    plan.load()
    plan.use({"a": 3, "b": 2, "c": 1, "d": 4}, now_s=1.0)

    plan.ask("x", W0, now_s=STAY_S)

    assert plan.held == {W0: "ab", W1: "dx"}
    assert plan.num_evictions == 1


def test_a_use_counts_half_after_the_half_life() -> None:
    plan = Plan(W0, capacity=2)
    plan.offer("abxy")
    plan.ask("ab", W0)
    plan.load()
    plan.use({"a": 7}, now_s=0.0)
    plan.use({"b": 2}, now_s=2 * HALF_LIFE_S)  # 7 is 1.75 by then

    plan.ask("x", W0, now_s=2 * HALF_LIFE_S)

    assert plan.held == {W0: "bx"}


def test_uses_add_up_though_they_fade() -> None:
    plan = Plan(W0, capacity=2)
    plan.offer("abx")
    plan.ask("ab", W0)
    plan.load()
    plan.use({"a": 4}, now_s=0.0)
    plan.use({"a": 1, "b": 2, "unknown": 9}, now_s=HALF_LIFE_S)  # a: 3

    plan.ask("x", W0, now_s=HALF_LIFE_S)

    assert plan.held == {W0: "ax"}


UNMOVED: dict[str, Callable[[Plan], None]] = {
    "pinned": lambda plan: (plan.offer("a", pinned=True), plan.ask("a"), plan.load())[0],
    "everywhere": lambda plan: (plan.offer("a", EVERYWHERE), plan.load())[0],
    "replicas": lambda plan: (plan.offer("a", REPLICAS), plan.load())[0],
    "last of its replicas": lambda plan: (plan.offer("a", replicas=2), plan.ask("a"), plan.load())[0],
    "pending": lambda plan: (plan.offer("a"), plan.ask("a"))[0],
    "reloading": lambda plan: (plan.offer("a"), plan.ask("a"), plan.load(), plan.reopen("a"))[0],
    "just loaded": lambda plan: (plan.offer("a"), plan.ask("a"), plan.load(100.0 - 0.9 * STAY_S))[0],
}


@pytest.mark.parametrize("kind", UNMOVED)
def test_some_adapters_never_make_room(kind: str) -> None:
    plan = Plan(W0, capacity=1)
    UNMOVED[kind](plan)
    plan.offer("x")

    plan.ask("x", W0, now_s=100.0)

    assert (plan.held, plan.waiting, plan.num_evictions) == ({W0: "a"}, 1, 0)


@pytest.mark.parametrize("placement", [EVERYWHERE, REPLICAS])
def test_what_must_be_somewhere_takes_room_from_what_is_there_on_demand(placement: Placement) -> None:
    plan = Plan(W0, capacity=1)
    plan.offer("a")
    plan.ask("a")
    plan.load()

    plan.offer("x", placement, now_s=STAY_S)

    assert (plan.held, plan.num_evictions) == ({W0: "x"}, 1)


def test_room_that_is_left_is_given_to_what_must_be_everywhere() -> None:
    plan = Plan(W0, W1, capacity=1)
    plan.offer("e", ON_DEMAND)
    plan.offer("r", REPLICAS, replicas=2)
    plan.offer("e", EVERYWHERE)
    plan.offer("r", REPLICAS, replicas=1)
    plan.settle(now_s=0.0)

    assert sorted(plan.held.values()) == ["e", "r"]


# -- wishes ------------------------------------------------------------------------------------------------------------


def full() -> Plan:
    """One worker, filled by an adapter that is being loaded."""
    plan = Plan(W0, capacity=1)
    plan.offer("axyz")
    plan.ask("a")
    return plan


def test_a_wish_that_cannot_be_granted_waits_until_it_can() -> None:
    plan = full()
    plan.ask("x")
    assert (plan.held, plan.waiting) == ({W0: "a"}, 1)
    plan.load(now_s=1.0)
    assert (plan.held, plan.waiting) == ({W0: "a"}, 1)

    plan.settle(now_s=1.0 + STAY_S)

    assert (plan.held, plan.waiting) == ({W0: "x"}, 0)


@pytest.mark.parametrize(("renewed_s", "held"), [(0.0, "a"), (1.0, "x")])
def test_a_wish_that_is_not_repeated_is_given_up(renewed_s: float, held: str) -> None:
    plan = full()
    plan.ask("x")
    plan.ask("x", now_s=renewed_s)
    plan.settle(now_s=renewed_s + WAIT_S)
    assert plan.waiting == 1

    plan.load(now_s=1.0)
    plan.settle(now_s=WAIT_S + 0.5)

    assert (plan.held, plan.waiting) == ({W0: held}, 0)


def test_the_adapter_that_most_wait_for_comes_first_then_the_one_that_waited_longest() -> None:
    def order(wishes: Sequence[tuple[str, int]]) -> str:
        plan = full()
        for at, (name, waiting) in enumerate(wishes):
            plan.ask(name, waiting=waiting, now_s=at / 10)
        plan.load(now_s=1.0)
        plan.settle(now_s=1.0 + STAY_S)
        return plan.held[W0]

    assert order([("x", 1), ("y", 3), ("z", 2)]) == "y"
    assert order([("y", 1), ("x", 2), ("z", 2), ("y", 2)]) == "y"
    assert order([("y", 2), ("x", 2), ("z", 2), ("y", 1)]) == "x"


def test_a_wish_for_what_is_dropped_or_unknown_is_none() -> None:
    plan = full()
    plan.ask("x")
    plan.drop("x", now_s=0.0)
    plan.ask("?x")

    assert plan.waiting == 0


def test_bytes_are_a_limit_too_and_as_many_leave_as_must() -> None:
    plan = Plan()
    plan.join(W0, Place(capacity=8, slots=8, capacity_bytes=100), held=(), now_s=0.0)
    for name, size_bytes in (("a", 30), ("b", 30), ("c", 40)):
        plan.offer(name, size_bytes=size_bytes)
        plan.ask(name)
    plan.load()
    plan.use({"c": 3, "b": 2, "a": 1}, now_s=1.0)
    plan.offer("d", size_bytes=50, now_s=10.0)
    plan.ask("d", now_s=10.0)
    assert (plan.held, plan.num_evictions) == ({W0: "cd"}, 2)


def test_what_is_larger_than_a_worker_never_gets_a_place() -> None:
    plan = Plan()
    plan.join(W0, Place(capacity=8, slots=8, capacity_bytes=100), held=(), now_s=0.0)
    plan.offer("a", size_bytes=60)
    plan.ask("a")
    plan.load()
    plan.offer("z", size_bytes=101, now_s=10.0)
    plan.ask("z", now_s=10.0)
    assert (plan.held, plan.waiting) == ({W0: "a"}, 1)
