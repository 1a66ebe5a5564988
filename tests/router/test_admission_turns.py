"""FairQueue's turns, exactly: against a naive model of each adapter's virtual time, and what broke turns once."""

from __future__ import annotations

import random

import pytest

from router.admission import FairQueue, Priority, Ticket
from tests.router.test_admission import MANY, pop, queue_of, served, ticket

HIGH, NORMAL, LOW = Priority
ADAPTERS = (None, "a", "b")
NUM_STEPS = 100


class NaiveTurns:
    """Every line's start is kept as long as anybody waits."""

    def __init__(self) -> None:
        self.waiting: list[Ticket] = []
        self.starts: dict[tuple[Priority, str | None], float] = {}
        self.virtual = dict.fromkeys(Priority, 0.0)

    def offer(self, one: Ticket) -> None:
        key = (one.priority, one.adapter)
        if key not in {(w.priority, w.adapter) for w in self.waiting}:
            self.starts[key] = max(self.starts.get(key, 0.0), self.virtual[one.priority])
        self.waiting.append(one)

    def possible(self, without: frozenset[str | None]) -> list[Ticket]:
        """Heads of lines that may be next; several where they start at once."""
        with_room = [one for one in self.waiting if one.adapter not in without]
        if not with_room:
            return []
        best = min((one.priority, self.starts[one.priority, one.adapter]) for one in with_room)
        lines = {one.adapter: one for one in reversed(with_room) if one.priority == best[0]}
        return [one for one in lines.values() if self.starts[one.priority, one.adapter] == best[1]]

    def pop(self, one: Ticket, without: frozenset[str | None]) -> None:
        at = self.starts[one.priority, one.adapter]
        self.virtual[one.priority] = at
        self.starts[one.priority, one.adapter] += max(1, one.tokens)
        for adapter in without:
            if (one.priority, adapter) in self.starts:
                self.starts[one.priority, adapter] = max(self.starts[one.priority, adapter], at)
        self.leave(one)

    def leave(self, one: Ticket) -> None:
        self.waiting.remove(one)
        if not self.waiting:
            self.__init__()  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(60))
def test_turns_are_those_of_the_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    queue, model = FairQueue(MANY), NaiveTurns()
    for _ in range(NUM_STEPS):
        what = rng.random()
        if what < 0.5:
            one = ticket(rng.choice(ADAPTERS), rng.choice((NORMAL, NORMAL, LOW)), rng.randrange(10))
            assert queue.offer(one) is None
            model.offer(one)
        elif what < 0.85:
            without = frozenset(rng.sample(ADAPTERS, rng.choice((0, 0, 1))))
            possible = model.possible(without)
            found = pop(queue, without=without)
            assert found in (possible or [None])
            if found is not None:
                model.pop(found, without)
        elif model.waiting:
            one = rng.choice(model.waiting)
            queue.remove(one)
            model.leave(one)
        assert set(queue) == set(model.waiting)


def test_what_another_priority_has_had_does_not_put_a_single_request_behind_a_flood() -> None:
    queue = queue_of(("a", LOW, 40), ("c", HIGH, 40), max_queued=MANY)
    assert [one.priority for one in served(queue, 40)] == [HIGH] * 40
    single = ticket("b", LOW)
    queue.offer(single)
    assert single in served(queue, 2)


def test_an_adapter_that_has_one_request_in_line_at_a_time_gets_no_more_than_its_share() -> None:
    queue = queue_of(("b", NORMAL, 200), max_queued=MANY)
    got = {"a": 0, "b": 0}
    queue.offer(ticket("a", tokens=1000))
    for _ in range(100):
        one = pop(queue)
        assert one is not None
        got[str(one.adapter)] += one.tokens
        if one.adapter == "a":
            queue.offer(ticket("a", tokens=1000))
        assert abs(got["a"] - got["b"]) <= 1000


def test_a_flood_that_had_no_room_for_a_while_has_no_claim_to_what_others_had() -> None:
    queue = queue_of(("a", NORMAL, 40), ("b", NORMAL, 60), max_queued=MANY)
    for _ in range(40):
        one = pop(queue, without=frozenset("a"))
        assert one is not None
        assert one.adapter == "b"
    single = ticket("c")
    queue.offer(single)
    following = served(queue, 8)
    assert single in following[:3]
    assert [one.adapter for one in following].count("b") >= 3


def test_requests_that_left_are_not_counted_as_had() -> None:
    queue = FairQueue(MANY)
    tickets = [ticket("a", since_s=float(n)) for n in range(40)]
    for one in tickets:
        queue.offer(one)
    for _ in range(40):
        queue.offer(ticket("b", since_s=99.0))
    assert queue.expire(39.0) == tickets[:39]
    assert tickets[39] in served(queue, 2)


def test_where_nobody_may_wait_everybody_is_refused() -> None:
    queue = FairQueue(0)
    one = ticket("a")
    assert (queue.offer(one), len(queue)) == (one, 0)
