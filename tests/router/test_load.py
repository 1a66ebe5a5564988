"""The load book equals the sum of open bookings: never negative, zero at rest, blind to sources that are gone."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from router.booking import Booking
from router.decode import MIN_TOKENS
from router.ids import LoraId
from router.load import LoadBook
from router.terms import MIN_QUEUE_SHARE, RECENT, RUNS, queue_ms, step_ms

A, B, C = LoraId("a" * 32), LoraId("b" * 32), LoraId("c" * 32)
LORA_IDS = (None, A, B, C)
GAIN = 0.02
"""What one request weighs in the averages of the fleet."""


def book_of(num_columns: int = 1) -> LoadBook:
    """A millisecond a token, and a thousandth of one beside."""
    book = LoadBook(prefill_tokens_per_s=1000.0, overhead_ms=0.001)
    book.widen(num_columns)
    return book


def booked(book: LoadBook, column: int = 0) -> tuple[float, float, float, float, float]:
    """All that is booked on a column; zeros at rest."""
    fields = (book.queued_tokens, book.queued_ms, book.running, book.kv_tokens, book.distinct)
    return tuple(float(field[column]) for field in fields)  # type: ignore[return-value]  # five of them


def flags(book: LoadBook, lora_id: LoraId | None) -> list[int]:
    return [int(flag) for flag in book.slots.flags(lora_id, np.arange(len(book.running)))]


AT_REST = (0.0,) * 5


class _Open:
    """A booking that is neither finished nor void, as the model knows it."""

    def __init__(
        self, column: int, tokens: int, lora_id: LoraId | None, kv_tokens: int, own_ms: float, whole: bool
    ) -> None:
        self.whole = whole
        self.column = column
        self.tokens = tokens
        self.lora_id = lora_id
        self.kv_tokens = kv_tokens
        self.own_ms = own_ms
        self.queued = True


class OpenBookings(RuleBasedStateMachine):
    """Bookings in any order of life, calls repeated, columns that change hands, against a plain dict."""

    bookings = Bundle("bookings")
    columns = st.integers(0, 1)

    @initialize()
    def start(self) -> None:
        self.book = book_of(2)
        self.now_s = 100.0
        self.open: dict[Booking, _Open] = {}
        #: by column, adapters by last use, as many as the last booking's slots
        self.recent: dict[int, list[LoraId]] = {0: [], 1: []}

    @rule(
        target=bookings,
        column=columns,
        tokens=st.one_of(st.integers(0, 9), st.integers(0, 200_000)),
        lora_id=st.sampled_from(LORA_IDS),
        kv_tokens=st.integers(0, 1000),
        num_slots=st.integers(0, 3),
        capacity_tokens=st.integers(0, 2000),
        whole=st.booleans(),
    )
    def dispatch(
        self,
        column: int,
        tokens: int,
        lora_id: LoraId | None,
        kv_tokens: int,
        num_slots: int,
        capacity_tokens: int,
        whole: bool,
    ) -> Booking:
        booking = self.book.book(
            column,
            tokens=tokens,
            lora_id=lora_id,
            now_s=self.now_s,
            kv_tokens=kv_tokens,
            num_slots=num_slots,
            capacity_tokens=capacity_tokens,
            whole=whole,
        )
        used_tokens = sum(one.kv_tokens for one in self.open.values() if one.column == column)
        assert booking.cramped == (capacity_tokens > 0 and used_tokens + kv_tokens > capacity_tokens)
        assert booking.own_ms == self.book.speed.ms(column, tokens)
        self.open[booking] = _Open(column, tokens, lora_id, kv_tokens, booking.own_ms, whole)
        if lora_id is not None and num_slots:
            recent = [one for one in self.recent[column] if one != lora_id]
            self.recent[column] = [*recent, lora_id][-num_slots:]
        return booking

    @rule(took_s=st.floats(0, 100))
    def wait(self, took_s: float) -> None:
        self.now_s += took_s

    @rule(booking=bookings, times=st.integers(1, 2))
    def first_token(self, booking: Booking, times: int) -> None:
        for _ in range(times):
            booking.first_token(now_s=self.now_s)
        if booking in self.open and self.open[booking].queued:
            self.open[booking].queued = False
            before = itertools.takewhile(lambda one: one is not booking, self.open)  # as they were dispatched
            for one in list(before):
                if one.whole and self.open[one].column == self.open[booking].column:
                    self.open[one].queued = False

    @rule(booking=bookings, well=st.booleans(), times=st.integers(1, 2))
    def finish(self, booking: Booking, well: bool, times: int) -> None:
        for _ in range(times):
            booking.finish(now_s=self.now_s if well else None)
        self.open.pop(booking, None)

    @rule(column=columns)
    def reset(self, column: int) -> None:
        self.book.reset(column)
        self.open = {booking: one for booking, one in self.open.items() if one.column != column}
        self.recent[column] = []

    @rule(num_columns=st.integers(0, 4))
    def widen(self, num_columns: int) -> None:
        self.book.widen(num_columns)

    @invariant()
    def book_is_the_sum_of_open_bookings(self) -> None:
        for column in (0, 1):
            rows = [one for one in self.open.values() if one.column == column]
            queued = [one for one in rows if one.queued]
            queued_ms = sum(one.own_ms for one in queued)
            lora_ids = [one.lora_id for one in rows]
            expected = (
                sum(one.tokens for one in queued),
                pytest.approx(queued_ms, rel=1e-6, abs=1e-3) if queued_ms else 0.0,
                len(rows),
                sum(one.kv_tokens for one in rows),
                len(set(lora_ids)),
            )
            assert booked(self.book, column) == expected
            assert self.book.slots.running[column] == {lora_id: lora_ids.count(lora_id) for lora_id in lora_ids}
            left_ms = queue_ms(self.book.state[column], self.now_s)
            assert self.book.queued_ms[column] * MIN_QUEUE_SHARE <= left_ms <= self.book.queued_ms[column]
        self.book.check()

    @invariant()
    def flags_tell_who_runs_and_who_is_recent(self) -> None:
        running = {(one.column, one.lora_id) for one in self.open.values()}
        for lora_id in LORA_IDS:
            assert flags(self.book, lora_id)[:2] == [
                RUNS * ((column, lora_id) in running) + RECENT * (lora_id in self.recent[column]) for column in (0, 1)
            ]

    @invariant()
    def averages_are_positive(self) -> None:
        assert 0 < self.book.slot_ms < np.inf
        assert 0 < self.book.request_ms < np.inf
        assert (self.book.speed.factors > 0).all()

    def teardown(self) -> None:
        for booking in list(self.open):
            booking.finish()
        assert [booked(self.book, column) for column in range(len(self.book.running))] == [AT_REST] * len(
            self.book.running
        )
        assert not any(self.book.slots.running)
        self.book.check()


TestOpenBookings = OpenBookings.TestCase
TestOpenBookings.settings = settings(
    deadline=None, max_examples=100, stateful_step_count=30, derandomize=True, database=None
)


# -- lives of bookings -------------------------------------------------------------------------------------------


def test_bookings_of_a_source_that_is_gone_are_void() -> None:
    book = book_of()
    old = book.book(0, tokens=100, lora_id=A, now_s=0.0, kv_tokens=200, num_slots=1)
    book.reset(0)
    assert booked(book) == AT_REST
    assert flags(book, A) == [0]
    new = book.book(0, tokens=5, lora_id=A, now_s=0.0, kv_tokens=7)
    before = booked(book), book.speed.log_ms.tolist(), book.request_ms
    old.first_token(now_s=9.0)
    old.finish(now_s=10.0)
    assert (booked(book), book.speed.log_ms.tolist(), book.request_ms) == before
    assert book.slots.running[0] == {A: 1}
    new.finish()
    assert booked(book) == AT_REST
    book.check()


def test_ending_twice_or_after_the_end_changes_nothing() -> None:
    book = book_of()
    other = book.book(0, tokens=7, lora_id=A, now_s=0.0, kv_tokens=9)
    before = booked(book)
    booking = book.book(0, tokens=100, lora_id=A, now_s=0.0, kv_tokens=300)
    booking.first_token(now_s=1.0)
    booking.finish(now_s=2.0)
    learned = book.speed.log_ms.tolist(), book.request_ms
    for _ in range(2):
        booking.finish(now_s=50.0)
        booking.first_token(now_s=60.0)
    assert booked(book) == pytest.approx(before)
    assert (book.speed.log_ms.tolist(), book.request_ms) == learned
    assert book.slots.running[0] == {A: 1}
    other.finish()
    assert booked(book) == AT_REST
    book.check()


def test_first_token_takes_the_prompt_out_of_the_queue_and_leaves_the_request_running() -> None:
    book = book_of()
    booking = book.book(0, tokens=100, lora_id=None, now_s=0.0, kv_tokens=150)
    assert booked(book) == (100, booking.own_ms, 1, 150, 1)
    booking.first_token(now_s=0.1)
    assert booked(book) == (0, 0, 1, 150, 1)


def test_request_that_fails_before_its_first_token_teaches_nothing() -> None:
    book = book_of()
    fresh = book_of()
    booking = book.book(0, tokens=100, lora_id=A, now_s=0.0, kv_tokens=150, num_slots=1)
    booking.finish(now_s=70.0)
    booking.first_token(now_s=80.0)
    assert booked(book) == AT_REST
    assert book.speed.log_ms.tolist() == fresh.speed.log_ms.tolist()
    assert (book.request_ms, book.slot_ms) == (fresh.request_ms, fresh.slot_ms)


# -- what requests teach -----------------------------------------------------------------------------------------


def test_first_request_sets_the_speed() -> None:
    book = book_of()
    book.book(0, tokens=1000, lora_id=None, now_s=10.0).first_token(now_s=10.05)
    assert book.speed.ms(0, 1000) == pytest.approx(50)


def test_waiting_for_prompts_ahead_is_not_taken_for_computing() -> None:
    book = book_of()
    ahead = book.book(0, tokens=3000, lora_id=None, now_s=0.0)
    booking = book.book(0, tokens=1000, lora_id=None, now_s=1.0)
    ahead.first_token(now_s=3.0)
    before = book.speed.log_ms.copy()
    booking.first_token(now_s=4.0)
    assert book.speed.log_ms == pytest.approx(before, abs=1e-4)
    assert book.speed.num_samples(0) == 2


@pytest.mark.parametrize("why", ["whole", "cramped", "over"])
def test_requests_that_waited_for_something_else_teach_no_speed(why: str) -> None:
    book = book_of()
    book.book(0, tokens=0, lora_id=B, now_s=0.0, kv_tokens=800, num_slots=1)
    booking = book.book(
        0,
        tokens=1000,
        lora_id=A if why == "over" else B,
        now_s=0.0,
        kv_tokens=300,
        num_slots=1,
        capacity_tokens=1099 if why == "cramped" else 1100,
        whole=why == "whole",
    )
    booking.first_token(now_s=70.0)
    assert book.speed.num_samples(0) == 0
    assert book.speed.log_ms.tolist() == book_of().speed.log_ms.tolist()
    assert (book.slot_ms == 200.0) is (why != "over")


@pytest.mark.parametrize(
    ("num_slots", "running", "over"),
    [
        (0, (A, B), 0),  # any number
        (3, (A, B), 0),
        (2, (A, B), 1),
        (1, (A, B), 2),
        (1, (None,), 1),  # the base model takes a slot
        (1, (C,), 0),  # it runs there
        (1, (A, C), 0),
    ],
)
def test_wait_for_a_slot_is_learned_for_each_adapter_too_many(
    num_slots: int, running: tuple[LoraId | None, ...], over: int
) -> None:
    book = book_of()
    for lora_id in running:
        book.book(0, tokens=0, lora_id=lora_id, now_s=0.0)
    booking = book.book(0, tokens=100, lora_id=C, now_s=0.0, num_slots=num_slots)
    booking.first_token(now_s=0.5)
    waited_ms = 500 - booking.own_ms
    assert book.slot_ms == pytest.approx(200 + GAIN * (waited_ms / over - 200) if over else 200)
    assert book.speed.num_samples(0) == (over == 0)


@pytest.mark.parametrize(("took_s", "sample_ms"), [(0.1, 50.0), (60.0, 800.0)])
def test_one_wait_counts_at_most_four_times_or_a_quarter(took_s: float, sample_ms: float) -> None:
    book = book_of()
    book.book(0, tokens=0, lora_id=A, now_s=0.0)
    book.book(0, tokens=1000, lora_id=B, now_s=0.0, num_slots=1).first_token(now_s=took_s)
    assert book.slot_ms == pytest.approx(200 + GAIN * (sample_ms - 200))


def test_wait_that_was_assumed_to_be_none_is_learned() -> None:
    book = LoadBook(prefill_tokens_per_s=1000.0, slot_wait_ms=0.0)
    book.widen(1)
    book.book(0, tokens=0, lora_id=A, now_s=0.0)
    for n in range(500):
        booking = book.book(0, tokens=1, lora_id=B, now_s=float(n), num_slots=1)
        booking.first_token(now_s=n + 0.3)
        booking.finish()
    assert book.slot_ms == pytest.approx(300, rel=0.1)


def test_a_clock_that_stands_before_the_last_booking_is_no_older() -> None:
    book = book_of()
    book.book(0, tokens=1, lora_id=None, now_s=100_000.0)
    assert book.sent(np.array([0]), 0.0).tolist() == [1.0]
    book.book(0, tokens=1, lora_id=None, now_s=0.0)
    assert book.sent(np.array([0]), 0.0).tolist() == [2.0]


def test_duration_is_learned_of_requests_that_end_well_and_stream() -> None:
    book = book_of()
    endings = [(False, None), (True, 4.0), (False, 4.0)]
    seen = []
    for whole, end_s in endings:
        booking = book.book(0, tokens=10, lora_id=None, now_s=0.0, whole=whole)
        booking.first_token(now_s=1.0)
        booking.finish(now_s=end_s)
        seen.append(book.request_ms)
    assert seen == pytest.approx([5000, 5000, 5000 + GAIN * (3000 - 5000)])


def test_decode_steps_are_learned_of_streams_less_the_prompts_computed_meanwhile() -> None:
    book = book_of()
    for n in range(8):
        stream = book.book(0, tokens=100, context_tokens=1000, lora_id=None, now_s=10.0 * n)
        stream.first_token(now_s=10.0 * n)
        other = book.book(0, tokens=2000, lora_id=None, now_s=10.0 * n)
        other.first_token(now_s=10.0 * n + 2)
        other.finish(now_s=10.0 * n + 2)
        stream.finish(now_s=10.0 * n + 2.5 + other.own_ms / 1000, output_tokens=101)
    assert book.decode.num_samples == 8
    assert step_ms(book.decode.model, 1, 1000) == pytest.approx(25.0, rel=0.05)


@pytest.mark.parametrize("how", ["short", "whole", "broken"])
def test_no_decode_step_is_learned_of_what_does_not_tell(how: str) -> None:
    book = book_of()
    booking = book.book(0, tokens=100, lora_id=None, now_s=0.0, whole=how == "whole")
    booking.first_token(now_s=1.0)
    booking.finish(now_s=None if how == "broken" else 2.0, output_tokens=MIN_TOKENS - (how == "short"))
    assert book.decode.num_samples == 0


def test_prompts_that_were_given_up_took_no_time_from_decode_steps() -> None:
    book = book_of()
    for n in range(8):
        stream = book.book(0, tokens=100, context_tokens=1000, lora_id=None, now_s=10.0 * n)
        stream.first_token(now_s=10.0 * n)
        book.book(0, tokens=20_000, lora_id=None, now_s=10.0 * n).finish()  # its client has left
        stream.finish(now_s=10.0 * n + 2.5, output_tokens=101)
    assert step_ms(book.decode.model, 1, 1000) == pytest.approx(25.0, rel=0.05)


def test_whole_answers_wait_no_longer_than_their_prompts_take() -> None:
    """An engine that computes half of the time, prompt by prompt; nine of ten answers come whole, after 20 s."""
    rng, book = random.Random(1), book_of()
    arrivals = [(n * 0.4 + rng.uniform(0, 0.3), rng.random() < 0.9) for n in range(500)]
    waits_ms, believed_ms, ready_s = [], [], 0.0
    happen: list[tuple[float, int, Callable[..., None]]] = []
    for number, (at_s, whole) in enumerate(sorted(arrivals)):
        while happen and happen[0][0] <= at_s:
            then_s, _, act = heapq.heappop(happen)
            act(now_s=then_s)
        believed_ms.append(queue_ms(book.state[0], at_s))
        waits_ms.append(max(0.0, ready_s - at_s) * 1000)
        booking = book.book(0, tokens=1000, lora_id=None, now_s=at_s, whole=whole)
        ready_s = max(ready_s, at_s) + 0.2
        first_s = ready_s + 20 if whole else ready_s
        heapq.heappush(happen, (first_s, 2 * number, booking.first_token))
        heapq.heappush(happen, (ready_s + 20, 2 * number + 1, booking.finish))
    assert np.mean(believed_ms[50:]) == pytest.approx(np.mean(waits_ms[50:]), abs=150)
    assert book.speed.ms(0, 1000) == pytest.approx(200, rel=0.25)


def test_output_is_followed_slowly_and_no_single_one_counts_for_much() -> None:
    book = book_of()
    book.learn_output(1_000_000)
    assert book.output_tokens == pytest.approx(256 + GAIN * (1024 - 256))
    for _ in range(400):
        book.learn_output(100)
    assert book.output_tokens == pytest.approx(100, rel=0.01)


# -- columns -----------------------------------------------------------------------------------------------------


def test_the_last_adapters_that_slots_hold_are_recent() -> None:
    book = book_of(2)
    for lora_id in (A, B, A, None, C):
        book.book(0, tokens=1, lora_id=lora_id, now_s=0.0, num_slots=2).finish()
    book.book(1, tokens=1, lora_id=B, now_s=0.0, num_slots=2)
    assert {one: flags(book, one) for one in LORA_IDS} == {
        None: [0, 0],
        A: [RECENT, 0],
        B: [0, RUNS | RECENT],
        C: [RECENT, 0],
    }
    assert book.slots.flags(B, np.array([1, 1, 0])).tolist() == [RUNS | RECENT, RUNS | RECENT, 0]


def test_columns_are_booked_apart_and_widening_keeps_them() -> None:
    book = book_of(1)
    book.book(0, tokens=5, lora_id=A, now_s=0.0, kv_tokens=6)
    before = booked(book, 0)
    book.widen(3)
    book.widen(1)
    book.book(2, tokens=9, lora_id=A, now_s=0.0)
    assert [booked(book, column)[2] for column in range(3)] == [1, 0, 1]
    assert booked(book, 0) == before
    assert flags(book, A) == [RUNS, 0, RUNS]


def test_speed_of_a_source_that_is_gone_is_not_its_successors() -> None:
    book = book_of(2)
    for column, took_s in [(0, 1.0), (1, 1.0)] + [(0, 9.0), (1, 1.0)] * 20:
        book.book(column, tokens=1000, lora_id=None, now_s=0.0).first_token(now_s=took_s)
    assert book.speed.ms(0, 1000) > 1.5 * book.speed.ms(1, 1000)
    book.reset(0)
    assert (book.speed.factors[0], book.speed.num_samples(0)) == (1.0, 0)
