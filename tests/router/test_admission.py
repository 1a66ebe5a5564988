"""FairQueue: a bound, strict priorities, turns by tokens between adapters, and who has to go where it is full."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.admission import FairQueue, Priority, Ticket

HIGH, NORMAL, LOW = Priority
MANY = 1000


def ticket(adapter: str | None, priority: Priority = NORMAL, tokens: int = 100, since_s: float = 0.0) -> Ticket:
    return Ticket(adapter, priority, tokens, since_s)


def queue_of(*lines: tuple[str | None, Priority, int], max_queued: int | None = None) -> FairQueue:
    """So many requests of each adapter and priority; full unless told otherwise."""
    queue = FairQueue(sum(n for *_, n in lines) if max_queued is None else max_queued)
    for adapter, priority, n in lines:
        for _ in range(n):
            assert queue.offer(ticket(adapter, priority)) is None
    return queue


def pop(queue: FairQueue, *, without: frozenset[str | None] = frozenset(), now_s: float = 0.0) -> Ticket | None:
    return queue.pop(lambda adapter: adapter not in without, now_s)


def served(queue: FairQueue, most: int = MANY) -> list[Ticket]:
    """The next ones, in their order."""
    found = []
    while len(found) < most and (one := pop(queue)) is not None:
        found.append(one)
    return found


# -- order -------------------------------------------------------------------------------------------------------


def test_an_empty_queue_has_nobody() -> None:
    queue = FairQueue(3)
    assert (pop(queue), len(queue), list(queue), queue.expire(99.0)) == (None, 0, [], [])


def test_one_adapter_is_served_in_the_order_of_arrival() -> None:
    queue = FairQueue(MANY)
    tickets = [ticket("a", tokens=tokens) for tokens in (500, 1, 0, 80, 3)]
    for one in tickets:
        queue.offer(one)
    assert served(queue) == tickets


def test_priorities_are_strict_whatever_came_first_and_however_much_it_asks() -> None:
    queue = FairQueue(MANY)
    for priority in (LOW, NORMAL, HIGH) * 4:
        queue.offer(ticket(f"a{len(queue) % 2}", priority, tokens=1 if priority is LOW else 10_000))
    assert [one.priority for one in served(queue)] == [HIGH] * 4 + [NORMAL] * 4 + [LOW] * 4


def test_a_lower_priority_goes_where_no_higher_one_has_room() -> None:
    queue = queue_of(("a", HIGH, 1), ("b", LOW, 1), ("c", NORMAL, 1))
    passed = [pop(queue, without=frozenset("a")), pop(queue, without=frozenset("a"))]
    assert [one and one.adapter for one in passed] == ["c", "b"]
    assert pop(queue, without=frozenset("a")) is None
    assert [one.adapter for one in served(queue)] == ["a"]


TOKENS = st.integers(0, 5000)
LINES = st.lists(st.lists(TOKENS, min_size=1, max_size=15), min_size=2, max_size=5)


@settings(deadline=None, max_examples=120, derandomize=True, database=None)
@given(LINES, st.integers(0, 4))
def test_adapters_with_requests_waiting_get_the_same_tokens_but_for_one_request(
    lines: list[list[int]], num_early: int
) -> None:
    """Some come in while others are served, but nobody's line is ever empty until it ends."""
    queue = FairQueue(MANY)
    waiting = {f"a{n}": deque(line) for n, line in enumerate(lines)}
    largest = max(1, *(tokens for line in lines for tokens in line))
    in_line: Counter[str] = Counter()

    def arrive(adapter: str) -> None:
        if waiting[adapter]:
            queue.offer(ticket(adapter, tokens=waiting[adapter].popleft()))
            in_line[adapter] += 1

    for _ in range(num_early + 1):
        for adapter in waiting:
            arrive(adapter)
    got: Counter[str] = Counter(dict.fromkeys(waiting, 0))
    while all(in_line.values()):
        for adapter in waiting:
            if in_line[adapter] == 1:
                arrive(adapter)
        one = pop(queue)
        assert one is not None
        assert one.adapter is not None
        in_line[one.adapter] -= 1
        got[one.adapter] += max(1, one.tokens)
        assert max(got.values()) - min(got.values()) <= largest


@settings(deadline=None, max_examples=100, derandomize=True, database=None)
@given(st.lists(TOKENS, min_size=5, max_size=50), TOKENS, st.integers(0, 60), st.sampled_from([None, "b"]))
def test_a_flood_by_one_adapter_does_not_delay_the_single_request_of_another(
    flood: list[int], tokens: int, num_before: int, adapter: str | None
) -> None:
    queue = FairQueue(MANY)
    for one in flood:
        queue.offer(ticket("a", tokens=one))
    served(queue, num_before)
    single = ticket(adapter, tokens=tokens)
    queue.offer(single)
    assert single in served(queue, 2)


def test_an_adapter_that_was_away_gets_no_more_than_its_turns_for_it() -> None:
    queue = queue_of(("a", NORMAL, 40), max_queued=MANY)
    served(queue, 20)
    for _ in range(20):
        queue.offer(ticket("b"))
    turns = [one.adapter for one in served(queue, 20)]
    assert turns.count("b") in (10, 11)
    assert "bbb" not in "".join(map(str, turns))


def test_the_base_model_takes_turns_as_an_adapter_does() -> None:
    queue = queue_of(("a", NORMAL, 20), (None, NORMAL, 20))
    assert Counter(one.adapter for one in served(queue, 20)) == {"a": 10, None: 10}


def test_whoever_leaves_from_the_end_of_a_line_takes_its_turn_along() -> None:
    queue = queue_of(("a", NORMAL, 1), max_queued=MANY)
    gone = ticket("a", tokens=100_000)
    queue.offer(gone)
    queue.remove(gone)
    queue.offer(ticket("a"))
    for _ in range(5):
        queue.offer(ticket("b"))
    assert [one.adapter for one in served(queue, 4)].count("a") == 2


def test_once_empty_a_queue_forgets_what_adapters_have_had() -> None:
    queue = FairQueue(MANY)
    queue.offer(ticket("a", tokens=100_000))
    served(queue)
    for adapter in ("a", "b", "a", "b"):
        queue.offer(ticket(adapter))
    assert [one.adapter for one in served(queue)] == ["a", "b", "a", "b"]


# -- who has to go -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "newcomer", "victim"),
    [
        ([("a", NORMAL, 3)], ("b", NORMAL), "a"),
        ([("a", NORMAL, 3)], (None, NORMAL), "a"),
        ([(None, NORMAL, 3)], ("a", NORMAL), None),
        ([("a", NORMAL, 3)], ("a", NORMAL), "newcomer"),
        ([("a", NORMAL, 1)], ("b", NORMAL), "newcomer"),
        ([("a", NORMAL, 1), ("b", NORMAL, 1)], ("c", NORMAL), "newcomer"),
        ([("a", NORMAL, 2), ("b", NORMAL, 1)], ("b", NORMAL), "newcomer"),
        ([("a", NORMAL, 2), ("b", NORMAL, 1)], ("c", NORMAL), "a"),
        ([("b", NORMAL, 1), ("a", NORMAL, 3)], ("b", NORMAL), "a"),
        ([("a", NORMAL, 2), ("b", NORMAL, 5), ("c", NORMAL, 3)], ("a", NORMAL), "b"),
    ],
)
def test_of_one_priority_the_longest_line_loses_its_latest_unless_the_newcomers_would_be_as_long(
    lines: list[tuple[str | None, Priority, int]], newcomer: tuple[str | None, Priority], victim: str | None
) -> None:
    queue = queue_of(*lines)
    before = list(queue)
    coming = ticket(*newcomer)
    going = queue.offer(coming)
    assert going is not None
    assert len(queue) == len(before)
    if victim == "newcomer":
        assert going is coming
        assert list(queue) == before
    else:
        assert (going is coming, going.adapter) == (False, victim)
        assert going is [one for one in before if one.adapter == victim][-1]
        assert set(queue) == {*before, coming} - {going}


@pytest.mark.parametrize(
    ("lines", "newcomer", "victim"),
    [
        ([("a", NORMAL, 9), ("b", LOW, 1)], ("c", NORMAL), ("b", LOW)),
        ([("a", NORMAL, 9), ("b", LOW, 1)], ("c", HIGH), ("b", LOW)),
        ([("a", NORMAL, 9), ("a", LOW, 1)], ("a", HIGH), ("a", LOW)),
        ([("a", NORMAL, 1), ("b", LOW, 1)], ("b", NORMAL), ("b", LOW)),
        ([("a", HIGH, 9), ("b", NORMAL, 1)], ("b", HIGH), ("b", NORMAL)),
        ([("a", HIGH, 9), ("b", NORMAL, 1)], ("c", LOW), ("c", LOW)),
        ([("a", NORMAL, 9)], ("b", LOW), ("b", LOW)),
        ([("a", HIGH, 9), ("b", NORMAL, 3)], ("c", NORMAL), ("b", NORMAL)),
        ([("a", HIGH, 9), ("b", NORMAL, 1)], ("c", NORMAL), ("c", NORMAL)),
    ],
)
def test_the_lowest_priority_goes_first_and_never_one_higher_than_the_newcomers(
    lines: list[tuple[str | None, Priority, int]],
    newcomer: tuple[str, Priority],
    victim: tuple[str, Priority],
) -> None:
    queue = queue_of(*lines)
    going = queue.offer(ticket(*newcomer))
    assert going is not None
    assert (going.adapter, going.priority) == victim
    assert len(queue) == sum(n for *_, n in lines)


# -- when to come back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_queued", "pops_s", "now_s", "retry_s"),
    [
        (40, [], 5.0, 1),  # nothing is known of the pace
        (40, [4.0], 5.0, 1),
        (40, [5.0, 5.0], 5.0, 1),
        (40, [0.0, 1.0, 2.0, 3.0], 4.0, 20),
        (41, [0.0, 1.0, 2.0, 3.0], 4.0, 20),
        (40, [0.0, 1.0], 4.0, 40),
        (40, [0.0, 0.0], 1000.0, 60),
        (0, [0.0, 0.0], 1000.0, 1),
        (4, [i / 64 for i in range(64)], 1.0, 1),
    ],
)
def test_come_back_when_the_queue_is_half_as_long(
    num_queued: int, pops_s: list[float], now_s: float, retry_s: int
) -> None:
    queue = queue_of(("a", NORMAL, num_queued + len(pops_s)))
    for at_s in pops_s:
        pop(queue, now_s=at_s)
    assert len(queue) == num_queued
    assert queue.retry_after_s(now_s) == retry_s


def test_only_the_present_pace_counts() -> None:
    queue = queue_of(("a", NORMAL, 200))
    for i in range(164):
        pop(queue, now_s=i * 0.001 if i < 100 else 1000.0 + i - 100)
    assert queue.retry_after_s(1064.0) == 18


# -- all of it ---------------------------------------------------------------------------------------------------

ADAPTERS = st.sampled_from([None, "a", "b", "c"])
PRIORITIES = st.sampled_from(Priority)


class Lines(RuleBasedStateMachine):
    """Against plain lists: who is in, who may be next, who must go. Turns are the business of the tests above."""

    @initialize(max_queued=st.integers(1, 12))
    def start(self, max_queued: int) -> None:
        self.max_queued = max_queued
        self.queue = FairQueue(max_queued)
        self.lines: dict[tuple[Priority, str | None], list[Ticket]] = {}
        self.gone: list[Ticket] = []
        self.now_s = 0.0

    @rule(adapter=ADAPTERS, priority=PRIORITIES, tokens=TOKENS, times=st.integers(1, 4))
    def offer(self, adapter: str | None, priority: Priority, tokens: int, times: int) -> None:
        for _ in range(times):
            one = ticket(adapter, priority, tokens, self.now_s)
            possible = self.possible_victims(one)
            victim = self.queue.offer(one)
            assert victim in possible
            if victim is not one:
                self.lines.setdefault((priority, adapter), []).append(one)
            if victim is not None and victim is not one:
                self.take(victim)

    @rule(without=st.frozensets(ADAPTERS, max_size=3))
    def pop(self, without: frozenset[str | None]) -> None:
        heads = [line[0] for (_, adapter), line in self.lines.items() if adapter not in without]
        best = min((head.priority for head in heads), default=None)
        one = pop(self.queue, without=without, now_s=self.now_s)
        assert one in ([head for head in heads if head.priority == best] or [None])
        if one is not None:
            self.take(one)

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for line in self.lines.values() for one in line]))
        self.queue.remove(one)
        self.take(one)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def leave_again(self, data: st.DataObject) -> None:
        self.queue.remove(data.draw(st.sampled_from(self.gone)))

    @rule(age_s=st.integers(0, 5))
    def expire(self, age_s: int) -> None:
        late = [one for line in self.lines.values() for one in line if one.since_s < self.now_s - age_s]
        assert set(self.queue.expire(self.now_s - age_s)) == set(late)
        for one in late:
            self.take(one)

    @rule(passed_s=st.integers(1, 3))
    def wait(self, passed_s: int) -> None:
        self.now_s += passed_s

    @invariant()
    def all_and_only_those_in_line_are_there(self) -> None:
        there = list(self.queue)
        assert len(there) == len(self.queue) == sum(map(len, self.lines.values())) <= self.max_queued
        for key, line in self.lines.items():
            assert [one for one in there if (one.priority, one.adapter) == key] == line
        assert isinstance(self.queue.retry_after_s(self.now_s), int)
        assert 1 <= self.queue.retry_after_s(self.now_s) <= 60

    def possible_victims(self, one: Ticket) -> list[Ticket | None]:
        """As the module says it; of lines that are alike any."""
        if sum(map(len, self.lines.values())) < self.max_queued:
            return [None]
        lowest = max(priority for priority, _ in self.lines)
        longest = max(len(line) for (priority, _), line in self.lines.items() if priority == lowest)
        own = len(self.lines.get((one.priority, one.adapter), [])) + 1
        if lowest < one.priority or (lowest == one.priority and own >= longest):
            return [one]
        return [line[-1] for (p, _), line in self.lines.items() if p == lowest and len(line) == longest]

    def take(self, one: Ticket) -> None:
        line = self.lines[one.priority, one.adapter]
        line.remove(one)
        if not line:
            del self.lines[one.priority, one.adapter]
        self.gone.append(one)


TestLines = Lines.TestCase
TestLines.settings = settings(deadline=None, max_examples=60, stateful_step_count=30, derandomize=True, database=None)
