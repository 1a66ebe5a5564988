"""More claims of actors/adapters/placement.py: workers that come and go, and random histories against invariants."""

from __future__ import annotations

import copy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from actors.adapters.entry import Entry, Placement
from actors.adapters.placement import Place, PlacementPlan
from router.ids import WorkerId
from tests.actors.adapters.plans import EVERYWHERE, ON_DEMAND, REPLICAS, W0, W1, W2, Plan, entry


def test_a_worker_that_is_back_gets_what_it_had_unless_somebody_else_has_it() -> None:
    plan = Plan(W0, W1)
    plan.offer("abc")
    plan.ask("abc", W0)
    plan.leave(W0, now_s=1.0)
    plan.ask("b", W1, now_s=1.0)
    plan.drop("c", now_s=1.0)
    assert plan.held == {W1: "b"}

    plan.enter(W0, now_s=2.0)

    assert plan.held == {W0: "a", W1: "b"}


def test_another_life_of_a_worker_keeps_its_share_and_what_it_holds_is_not_open() -> None:
    plan = Plan(W0, capacity=3)
    plan.offer("abcd")
    plan.ask("ab")
    plan.load()

    plan.join(W0, Place(3, 3), held=["b", "c", "unknown"], now_s=7.0)

    assert plan.held == {W0: "abc"}
    assert plan.places[W0].desired == {"a": None, "b": 7.0, "c": 7.0}


def test_a_worker_that_is_back_with_what_another_holds_makes_no_copy_too_much() -> None:
    plan = Plan(W0, W1)
    plan.offer("a", max_replicas=1)
    plan.ask("a", W0)
    plan.leave(W0, now_s=1.0)
    plan.ask("a", W1, now_s=1.0)

    plan.join(W0, Place(4, 4), held=["a"], now_s=2.0)

    assert len("".join(plan.held.values())) == 1


def test_what_was_dropped_while_a_worker_was_away_is_not_given_back_to_it() -> None:
    plan = Plan(W0)
    plan.offer("a")
    plan.ask("a")
    plan.leave(W0, now_s=1.0)
    plan.drop("a", now_s=1.0)
    plan.offer("a", now_s=1.0)

    plan.enter(W0, now_s=2.0)

    assert plan.held == {W0: ""}


# -- random histories --------------------------------------------------------------------------------------------------

WORKERS = st.sampled_from([W0, W1, W2])
NAMES = st.sampled_from("abcde")
TERMS = st.one_of(
    st.just((EVERYWHERE, 1)),
    st.tuples(st.just(REPLICAS), st.integers(1, 3)),
    st.tuples(st.just(ON_DEMAND), st.sampled_from([1, 1, 1, 2])),
)


class RandomPlan(RuleBasedStateMachine):
    """Anything that can happen, in any order, while time goes by."""

    @initialize(capacities=st.lists(st.integers(1, 3), min_size=3, max_size=3), slots=st.integers(1, 3))
    def start(self, capacities: list[int], slots: int) -> None:
        self.plan = PlacementPlan()
        self.now_s = 0.0
        self.capacities = dict(zip([W0, W1, W2], capacities, strict=True))
        self.slots = slots
        self.offered: dict[str, Entry] = {}
        self.present: set[WorkerId] = set()
        #: on-demand adapters that somebody may hold: asked for, or held by whoever came, since they are offered
        self.touched: set[str] = set()
        self.num_evictions = 0

    @rule(name=NAMES, terms=TERMS, pinned=st.booleans())
    def put(self, name: str, terms: tuple[Placement, int], pinned: bool) -> None:
        self.offered[name] = entry(name, terms[0], replicas=terms[1], pinned=pinned)
        if terms[0] is not ON_DEMAND:
            self.touched.add(name)
        self.change(self.offered[name])

    @rule(pinned=st.booleans())
    def put_limited(self, pinned: bool) -> None:
        self.offered["m"] = entry("m", max_replicas=2, pinned=pinned)
        self.change(self.offered["m"])

    def change(self, one: Entry) -> None:
        if not one.pinned:
            self.kept = {(w, name) for w, name in self.kept if name != one.name or self.is_open(w, name)}
        self.plan.put(one, now_s=self.now_s)

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        self.offered.pop(name, None)
        self.touched.discard(name)
        self.plan.drop(name, now_s=self.now_s)
        self.kept = {(worker_id, one) for worker_id, one in self.kept if one != name}

    @rule(name=NAMES | st.just("m"), preferred=st.lists(WORKERS, unique=True), more=st.booleans(), n=st.integers(1, 9))
    def want(self, name: str, preferred: list[WorkerId], more: bool, n: int) -> None:
        if name in self.offered:
            self.touched.add(name)
        self.plan.want(name, preferred, waiting=n, more=more, now_s=self.now_s)
        if name in self.offered and not self.plan.holders(name):
            assert all(len(place.desired) == place.capacity for place in self.plan.places.values())

    @rule(counts=st.dictionaries(NAMES, st.integers(1, 9)))
    def use(self, counts: dict[str, int]) -> None:
        self.plan.use(counts, now_s=self.now_s)

    @rule(worker_id=WORKERS, held=st.sets(NAMES | st.just("m"), max_size=3))
    def join(self, worker_id: WorkerId, held: set[str]) -> None:
        capacity = self.capacities[worker_id]
        held = set(sorted(held)[:capacity])
        self.touched |= held & self.offered.keys()
        self.plan.join(worker_id, Place(capacity, self.slots), held=sorted(held), now_s=self.now_s)
        self.present.add(worker_id)

    @rule(worker_id=WORKERS)
    def leave(self, worker_id: WorkerId) -> None:
        self.plan.leave(worker_id, now_s=self.now_s)
        self.present.discard(worker_id)
        self.kept = {(one, name) for one, name in self.kept if one != worker_id}

    @rule(worker_id=WORKERS, name=NAMES | st.just("m"))
    def concluded(self, worker_id: WorkerId, name: str) -> None:
        self.kept -= {(worker_id, name)} if not self.is_pinned(name) else set()
        self.plan.concluded(worker_id, name, now_s=self.now_s)

    @rule(name=NAMES)
    def reopen(self, name: str) -> None:
        self.plan.reopen(name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.0, 6.0, 200.0]))
    def settle(self, seconds: float) -> None:
        self.now_s += seconds
        self.plan.settle(now_s=self.now_s)

    def is_pinned(self, name: str) -> bool:
        return name in self.offered and self.offered[name].pinned

    def is_open(self, worker_id: WorkerId, name: str) -> bool:
        return self.plan.places[worker_id].desired[name] is None

    #: what was pinned or open a step ago and mustn't have made room since
    kept: set[tuple[WorkerId, str]] = set()  # noqa: RUF012  # always replaced, never changed

    @invariant()
    def what_may_not_make_room_is_still_there(self) -> None:
        places = self.plan.places
        for worker_id, name in self.kept:
            if self.offered[name].placement is not REPLICAS:  # of those, surplus ones go
                assert name in places[worker_id].desired, (worker_id, name)
        self.kept = {
            (worker_id, name)
            for worker_id, place in places.items()
            for name in place.desired
            if self.is_pinned(name) or self.is_open(worker_id, name)
        }

    @invariant()
    def books_agree(self) -> None:
        self.plan.check()
        assert self.plan.entries == self.offered
        assert self.plan.places.keys() == self.present
        for worker_id, place in self.plan.places.items():
            assert len(place.desired) <= self.capacities[worker_id]
            assert place.desired.keys() <= self.touched
        for name in self.offered:
            assert self.plan.holders(name) == [w for w, place in self.plan.places.items() if name in place.desired]
        assert self.num_evictions <= self.plan.num_evictions
        self.num_evictions = self.plan.num_evictions
        assert self.plan.waiting <= len(self.offered)

    @invariant()
    def everywhere_is_wherever_there_is_room(self) -> None:
        plan = copy.deepcopy(self.plan)
        plan.settle(now_s=self.now_s)  # once more: a surplus replica may have made room
        for name, one in self.offered.items():
            if one.placement is EVERYWHERE:
                assert all(name in p.desired or len(p.desired) == p.capacity for p in plan.places.values())


RandomPlan.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRandomPlan = RandomPlan.TestCase
