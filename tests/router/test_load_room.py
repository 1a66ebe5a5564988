"""Queue and room at a source, as booked here and as its engine counts, which is believed once it stays far off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.ids import LoraId
from router.load import LoadBook
from router.terms import MIN_QUEUE_SHARE, queue_ms

A = LoraId("a" * 32)
UNLIMITED: dict[str, float] = {"now_s": 0.0, "max_queue_ms": 1e12, "max_running": np.inf, "capacity_tokens": np.inf}


def book_of(num_running: int = 0, *, num_columns: int = 1) -> LoadBook:
    """A millisecond a token; requests run at column 0 whose prompts are computed."""
    book = LoadBook(prefill_tokens_per_s=1000.0, overhead_ms=0.001)
    book.widen(num_columns)
    for _ in range(num_running):
        book.book(0, tokens=0, lora_id=A, now_s=0.0, kv_tokens=100)
    return book


def has_room(book: LoadBook, **limits: float) -> bool:
    asked = {**UNLIMITED, **limits}
    by_column: dict[str, Any] = {
        name: np.array([float(asked.pop(name))]) for name in ("max_running", "capacity_tokens")
    }
    return book.has_room(np.array([0]), **by_column, **asked)


def report(book: LoadBook, *counts: int) -> float:
    """The engine's counts, one report after the other; what is then taken for foreign."""
    for count in counts:
        book.reported(0, count)
    return float(book.foreign[0])


def test_queue_shrinks_with_time_but_not_below_a_share() -> None:
    book = book_of()
    book.book(0, tokens=1000, lora_id=None, now_s=10.0)
    left = [queue_ms(book.state[0], now_s) for now_s in (9.0, 10.0, 10.25, 10.75, 11.0, 99.0)]
    assert left == pytest.approx([1000, 1000, 750, 250, 1000 * MIN_QUEUE_SHARE, 1000 * MIN_QUEUE_SHARE], rel=1e-4)


def test_time_before_a_queue_began_is_no_progress_of_it() -> None:
    book = book_of()
    book.book(0, tokens=1000, lora_id=None, now_s=0.0).first_token(now_s=1.0)
    book.book(0, tokens=1000, lora_id=None, now_s=50.0)
    assert queue_ms(book.state[0], 50.0) == pytest.approx(1000, rel=1e-4)


def test_time_for_which_a_queue_is_overdue_is_no_progress_of_what_comes_later() -> None:
    book = book_of()
    book.book(0, tokens=10, lora_id=None, now_s=0.0)
    book.book(0, tokens=2000, lora_id=None, now_s=5.0)
    assert queue_ms(book.state[0], 5.0) >= 2000


def test_progress_counts_from_the_last_first_token() -> None:
    book = book_of()
    first, _ = (book.book(0, tokens=1000, lora_id=None, now_s=0.0) for _ in range(2))
    first.first_token(now_s=3.0)
    assert book.queued_ms[0] == pytest.approx(1000, rel=1e-3)
    assert queue_ms(book.state[0], 3.0) == book.queued_ms[0]
    assert queue_ms(book.state[0], 3.5) == pytest.approx(book.queued_ms[0] - 500)


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({}, True),
        ({"max_running": 3}, False),
        ({"max_running": 4}, True),
        ({"capacity_tokens": 300}, False),
        ({"capacity_tokens": 301}, True),
    ],
    ids=str,
)
def test_room_ends_where_a_limit_is_reached(limits: dict[str, float], room: bool) -> None:
    assert has_room(book_of(3), **limits) is room


def test_room_comes_back_as_the_queue_is_computed() -> None:
    book = book_of()
    booking = book.book(0, tokens=1024, lora_id=A, now_s=10.0)
    assert [has_room(book, now_s=now_s, max_queue_ms=500.0) for now_s in (10.0, 10.5, 10.6)] == [False, False, True]
    overdue_ms = 1024 * MIN_QUEUE_SHARE
    assert [has_room(book, now_s=99.0, max_queue_ms=overdue_ms + n) for n in (-1, 1)] == [False, True]
    booking.first_token(now_s=99.0)
    assert has_room(book, now_s=99.0, max_queue_ms=0.0)


def test_booking_is_given_back_however_its_block_ends() -> None:
    book = book_of()
    booking = book.book(0, tokens=10, lora_id=A, now_s=0.0, kv_tokens=20)
    booking.first_token(now_s=1.0)
    with pytest.raises(KeyError), booking:
        raise KeyError
    assert (book.running[0], book.kv_tokens[0], book.request_ms) == (0, 0, 5000.0)
    book.check()


def test_requests_of_others_take_room_once_three_reports_agree() -> None:
    book = book_of(2)
    assert [report(book, 12) for _ in range(3)] == [0, 0, 10]
    assert [has_room(book, max_running=limit) for limit in (12, 13)] == [False, True]
    assert book.drifts == 1


def test_one_report_that_differs_is_passed_over() -> None:
    book = book_of(2)
    assert report(book, 2, 90, 2, 2, 90) == 0
    assert report(book_of(2), 12, 12, 12, 2, 12) == 10
    assert book.drifts == 0


@pytest.mark.parametrize(
    ("running", "reported", "foreign"), [(0, 2, 0), (0, 3, 3), (20, 24, 0), (20, 25, 5), (20, 9, -11)]
)
def test_small_differences_are_of_the_moment(running: int, reported: int, foreign: int) -> None:
    assert report(book_of(running), *[reported] * 3) == foreign


def test_drift_that_ends_is_over_and_counts_once_while_it_lasts() -> None:
    book = book_of(2)
    assert report(book, *[12] * 6) == 10
    assert report(book, 2, 2) == 0
    assert (report(book, *[12] * 3), book.drifts) == (10, 2)


def test_what_engines_said_is_forgotten_with_the_source() -> None:
    book = book_of(2)
    report(book, 12, 12, 12)
    book.reset(0)
    assert book.foreign[0] == 0
    assert report(book, 12, 12) == 0


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(st.lists(st.integers(0, 500), max_size=12), st.integers(0, 20))
def test_reports_change_nothing_that_is_booked(counts: list[int], running: int) -> None:
    book, fresh = book_of(running), book_of(running)
    foreign = report(book, *counts)
    assert not counts or min(counts) <= running + foreign <= max(counts) or foreign == 0
    assert book.running[0] == running
    assert (book.queued_ms[0], book.kv_tokens[0]) == (fresh.queued_ms[0], fresh.kv_tokens[0])
    book.check()
