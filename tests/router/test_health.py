"""Claims of router/health.py: three failures in a row, patience by what was expected, retries in proportion."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.health import FAILURES, MIN_STALL_S, STALL_FACTOR, Failures, RetryBudget, stall_limit_s
from router.ids import WorkerId

W0, W1 = WorkerId("w0"), WorkerId("w1")
WINDOW_S = 10.0
FREE = 100


@settings(deadline=None, max_examples=100, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from([W0, W1]), st.booleans()), max_size=40))
def test_a_worker_is_to_be_suspended_after_three_failures_without_an_answer_between(
    history: list[tuple[WorkerId, bool]],
) -> None:
    failures = Failures()
    for i, (worker_id, fails) in enumerate(history):
        if not fails:
            failures.answered(worker_id)
            continue
        own = [failed for of, failed in history[: i + 1] if of == worker_id]
        assert failures.failed(worker_id) is (own[-FAILURES:] == [True] * FAILURES)


def test_three_it_is() -> None:
    failures = Failures()
    assert [failures.failed(W0) for _ in range(5)] == [False, False, True, True, True]
    assert failures.failed(W1) is False
    failures.answered(W0)
    assert [failures.failed(W0) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("expected_ms", "limit_s"), [(0.0, 10.0), (1999.0, 10.0), (2000.0, 10.0), (2400.0, 12.0), (60_000.0, 300.0)]
)
def test_patience_grows_with_what_was_expected_and_is_never_short(expected_ms: float, limit_s: float) -> None:
    assert stall_limit_s(expected_ms) == pytest.approx(limit_s)
    assert stall_limit_s(expected_ms) == pytest.approx(max(MIN_STALL_S, STALL_FACTOR * expected_ms / 1000))


def test_retries_up_to_the_free_ones_need_no_requests() -> None:
    budget = RetryBudget()
    assert [budget.take(5.0) for _ in range(FREE + 2)] == [True] * FREE + [False] * 2


def test_what_is_refused_is_not_counted_and_the_window_gives_it_back() -> None:
    budget = RetryBudget()
    for i in range(FREE):
        assert budget.take(i / FREE)
    assert not any(budget.take(WINDOW_S) for _ in range(50))
    assert budget.take(WINDOW_S + 0.001), "the first has left the window"
    assert not budget.take(WINDOW_S + 0.001)


def test_requests_justify_retries_as_long_as_they_are_in_the_window() -> None:
    budget = RetryBudget()
    for _ in range(7):
        budget.asked(0.0)
    assert sum(budget.take(WINDOW_S) for _ in range(2 * FREE)) == FREE + 7
    late = RetryBudget()
    for _ in range(7):
        late.asked(0.0)
    assert sum(late.take(WINDOW_S + 0.001) for _ in range(2 * FREE)) == FREE


@settings(deadline=None, max_examples=30, derandomize=True, database=None)
@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 60), st.integers(0, 120)), max_size=12))
def test_within_any_window_there_are_at_most_a_hundred_retries_more_than_requests(
    steps: list[tuple[float, int, int]],
) -> None:
    """Against the plain counting of all that ever happened."""
    budget = RetryBudget()
    asked: list[float] = []
    retried: list[float] = []
    now_s = 0.0
    for pause_s, requests, retries in steps:
        now_s += pause_s
        for _ in range(requests):
            budget.asked(now_s)
            asked.append(now_s)
        for _ in range(retries):
            room = sum(now_s - at <= WINDOW_S for at in retried) < FREE + sum(now_s - at <= WINDOW_S for at in asked)
            assert budget.take(now_s) is room
            if room:
                retried.append(now_s)
