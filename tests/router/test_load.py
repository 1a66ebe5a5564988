"""The load book equals the sum of open bookings: never negative, zero at rest, blind to sources that are gone."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from router.ids import LoraId
from router.load import Booking, LoadBook

A, B = LoraId("a" * 32), LoraId("b" * 32)


def book_of(num_columns: int, *, prefill_tokens_per_s: float = 1000.0) -> LoadBook:
    book = LoadBook(prefill_tokens_per_s=prefill_tokens_per_s)
    book.widen(num_columns)
    return book


class OpenBookings(RuleBasedStateMachine):
    """Bookings in any order of life, columns that change hands, against a plain list."""

    bookings = Bundle("bookings")

    @initialize()
    def start(self) -> None:
        self.book = book_of(2)
        self.now_s = 0.0
        #: (column, tokens still queued or 0, adapter) of every booking that is neither finished nor void
        self.open: dict[Booking, tuple[int, int, LoraId | None]] = {}

    @rule(target=bookings, column=st.integers(0, 1), tokens=st.integers(0, 9), lora_id=st.sampled_from([None, A, B]))
    def dispatch(self, column: int, tokens: int, lora_id: LoraId | None) -> Booking:
        alone = not any(at == column for at, _, _ in self.open.values())
        booking = self.book.book(column, tokens=tokens, lora_id=lora_id, now_s=self.now_s)
        assert booking.alone == alone
        self.open[booking] = (column, tokens, lora_id)
        return booking

    @rule(booking=bookings, took_s=st.floats(0, 10))
    def first_token(self, booking: Booking, took_s: float) -> None:
        self.now_s += took_s
        booking.first_token(now_s=self.now_s)
        if booking in self.open:
            column, _, lora_id = self.open[booking]
            self.open[booking] = (column, 0, lora_id)

    @rule(booking=bookings)
    def finish(self, booking: Booking) -> None:
        booking.finish()
        self.open.pop(booking, None)

    @rule(column=st.integers(0, 1))
    def reset(self, column: int) -> None:
        self.book.reset(column)
        self.open = {booking: row for booking, row in self.open.items() if row[0] != column}

    @rule(num_columns=st.integers(0, 4))
    def widen(self, num_columns: int) -> None:
        self.book.widen(num_columns)

    @invariant()
    def book_is_the_sum_of_open_bookings(self) -> None:
        for column in (0, 1):
            rows = [row for row in self.open.values() if row[0] == column]
            adapters = [lora_id for _, _, lora_id in rows if lora_id is not None]
            assert self.book.running[column] == len(rows)
            assert self.book.queued_tokens[column] == sum(tokens for _, tokens, _ in rows)
            assert self.book.adapters[column] == {lora_id: adapters.count(lora_id) for lora_id in adapters}
        assert (self.book.tokens_per_ms > 0).all()
        self.book.check()

    def teardown(self) -> None:
        for booking in list(self.open):
            booking.finish()
        assert (self.book.running.tolist(), self.book.queued_tokens.tolist()) == (
            [0] * len(self.book.running),
            [0.0] * len(self.book.running),
        )
        assert not any(self.book.adapters)
        self.book.check()


TestOpenBookings = OpenBookings.TestCase
TestOpenBookings.settings = settings(
    deadline=None, max_examples=100, stateful_step_count=30, derandomize=True, database=None
)


def test_bookings_of_a_source_that_is_gone_are_void() -> None:
    book = book_of(1)
    old = book.book(0, tokens=100, lora_id=A, now_s=0.0)
    book.reset(0)
    new = book.book(0, tokens=5, lora_id=A, now_s=0.0)
    old.first_token(now_s=9.0)
    old.finish()
    assert (book.queued_tokens[0], book.running[0], book.adapters[0], book.tokens_per_ms[0]) == (5, 1, {A: 1}, 1.0)
    new.finish()
    assert (book.queued_tokens[0], book.running[0], book.adapters[0]) == (0, 0, {})
    book.check()


def test_ending_twice_or_after_the_end_changes_nothing() -> None:
    book = book_of(1)
    other = book.book(0, tokens=7, lora_id=A, now_s=0.0)
    booking = book.book(0, tokens=100, lora_id=A, now_s=0.0)
    for _ in range(2):
        booking.first_token(now_s=1.0)
        booking.finish()
        booking.first_token(now_s=2.0)
    assert (book.queued_tokens[0], book.running[0], book.adapters[0]) == (7, 1, {A: 1})
    other.finish()
    book.check()


def test_prefill_speed_is_learned_from_a_request_that_ran_alone() -> None:
    book = book_of(1)
    booking = book.book(0, tokens=1000, lora_id=None, now_s=10.0)
    booking.first_token(now_s=10.5)
    booking.first_token(now_s=99.0)
    assert book.tokens_per_ms[0] == pytest.approx(1.0 + 0.2 * (2.0 - 1.0))


def test_speed_follows_samples_one_step_at_a_time() -> None:
    book = book_of(2)
    for _ in range(60):
        book.observe(0, tokens=8000, took_ms=1000)
    book.observe(1, tokens=1 << 20, took_ms=1)
    assert book.tokens_per_ms.tolist() == pytest.approx([8.0, 1.0 + 0.2 * (4.0 - 1.0)], rel=1e-4)


@pytest.mark.parametrize(("tokens", "took_ms"), [(15, 1.0), (0, 1.0), (1000, 0.0), (1000, -5.0)])
def test_samples_that_tell_nothing_are_left_out(tokens: int, took_ms: float) -> None:
    book = book_of(1)
    book.observe(0, tokens=tokens, took_ms=took_ms)
    assert book.tokens_per_ms[0] == 1.0


def test_request_in_company_teaches_no_speed() -> None:
    book = book_of(1)
    first = book.book(0, tokens=0, lora_id=None, now_s=0.0)
    book.book(0, tokens=4000, lora_id=None, now_s=0.0).first_token(now_s=0.5)
    assert book.tokens_per_ms[0] == 1.0
    first.finish()
