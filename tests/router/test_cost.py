"""The cost of a candidate: what each term waits for. More of the prompt cached never raises it, nor load lowers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.cost import Costs, CostWeights, Demand, estimate
from router.ids import LoraId
from router.load import LoadBook
from router.terms import MIN_QUEUE_SHARE, TERMS

A, B, C = LoraId("a" * 32), LoraId("b" * 32), LoraId("c" * 32)
LORA_IDS = (None, A, B, C)
NUM_COLUMNS = 3
SAME = 1 - 1e-12
"""Rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A request that is booked, and perhaps answered."""

    column: int
    tokens: int
    lora_id: LoraId | None
    kv_tokens: int
    answered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fleet with its load, and a request. Tuples by column."""

    loads: tuple[Load, ...]
    took_s: float
    """From the first booking to the second; samples come of it."""
    waited_s: float
    """From the last booking to the request."""
    weights: CostWeights
    lora_id: LoraId | None
    uncached: tuple[int, ...]
    num_slots: tuple[int, ...]
    capacity: tuple[float, ...]
    max_running: tuple[float, ...]
    output_tokens: float


LOADS = st.builds(
    Load,
    column=st.integers(0, NUM_COLUMNS - 1),
    tokens=st.one_of(st.integers(0, 50), st.integers(0, 100_000)),
    lora_id=st.sampled_from(LORA_IDS),
    kv_tokens=st.integers(0, 100_000),
    answered=st.booleans(),
)
TERM_MS = st.one_of(st.just(0.0), st.floats(0.1, 1e4))
CASES = st.builds(
    Case,
    loads=st.lists(LOADS, max_size=8).map(tuple),
    took_s=st.integers(0, 10_000).map(lambda took_ms: took_ms / 1000),
    waited_s=st.floats(0.0, 10.0),
    weights=st.builds(
        CostWeights,
        prefill_tokens_per_s=st.floats(100.0, 1e6),
        overhead_ms=st.floats(0.1, 500.0),
        decode_step_ms=st.floats(0.1, 1e4),
        slot_wait_ms=TERM_MS,
        adapter_swap_ms=TERM_MS,
        others_share=st.floats(0.0, 2.0),
        request_ms=st.floats(1.0, 1e5),
    ),
    lora_id=st.sampled_from(LORA_IDS),
    uncached=st.tuples(*[st.integers(0, 300_000)] * NUM_COLUMNS),
    num_slots=st.tuples(*[st.integers(0, 4)] * NUM_COLUMNS),
    capacity=st.tuples(*[st.one_of(st.just(np.inf), st.integers(1, 500_000).map(float))] * NUM_COLUMNS),
    max_running=st.tuples(*[st.one_of(st.just(np.inf), st.integers(1, 5).map(float))] * NUM_COLUMNS),
    output_tokens=st.floats(1.0, 50_000.0),
)
COLUMNS = st.integers(0, NUM_COLUMNS - 1)
property_test = settings(deadline=None, max_examples=150, derandomize=True, database=None)


def book_of(weights: CostWeights) -> LoadBook:
    book = LoadBook(
        prefill_tokens_per_s=weights.prefill_tokens_per_s,
        overhead_ms=weights.overhead_ms,
        decode_step_ms=weights.decode_step_ms,
        slot_wait_ms=weights.slot_wait_ms,
        request_ms=weights.request_ms,
    )
    book.widen(NUM_COLUMNS)
    return book


def loaded(case: Case) -> tuple[LoadBook, float]:
    """The book of a case, and when its last booking was."""
    book, now_s = book_of(case.weights), 0.0
    for n, load in enumerate(case.loads):
        booking = book.book(
            load.column,
            tokens=load.tokens,
            lora_id=load.lora_id,
            now_s=now_s,
            kv_tokens=load.kv_tokens,
            num_slots=case.num_slots[load.column],
        )
        now_s += case.took_s if n == 0 else 0.0
        if load.answered:
            booking.first_token(now_s=now_s)
    return book, now_s


def ask(
    case: Case, book: LoadBook, now_s: float, columns: Sequence[int] = range(NUM_COLUMNS)
) -> tuple[Costs, dict[str, list[float]]]:
    """What estimate says of the case's request at these columns, and its rows by term."""
    costs = estimate(
        book,
        case.weights,
        np.array(columns),
        Demand(
            now_s=now_s,
            num_tokens=max(case.uncached),
            cached_tokens=np.array([max(case.uncached) - case.uncached[column] for column in columns]),
            output_tokens=case.output_tokens,
            lora_ids=[case.lora_id for _ in columns],
            num_slots=np.array([case.num_slots[column] for column in columns]),
            capacity_tokens=np.array([case.capacity[column] for column in columns]),
            max_running=np.array([case.max_running[column] for column in columns]),
        ),
    )
    rows = [costs.row(i) for i in range(len(columns))]
    return costs, {name: [row.get(name, 0.0) for row in rows] for name in TERMS}


def totals(case: Case) -> list[float]:
    book, now_s = loaded(case)
    return ask(case, book, now_s + case.waited_s)[0].total.tolist()


# -- properties --------------------------------------------------------------------------------------------------


@property_test
@given(CASES)
def test_terms_are_finite_and_not_negative_and_sum_to_the_total(case: Case) -> None:
    book, now_s = loaded(case)
    costs, _ = ask(case, book, now_s + case.waited_s)
    for i, total in enumerate(costs.total.tolist()):
        row = costs.row(i)
        assert set(row) <= set(TERMS)
        assert all(0 <= value < np.inf for value in row.values())
        assert sum(row.values()) == pytest.approx(total, rel=1e-9)
    book.check()


@property_test
@given(CASES, COLUMNS, st.integers(0, 300_000))
def test_more_of_the_prompt_cached_never_raises_a_cost(case: Case, column: int, cached: int) -> None:
    fewer = tuple(max(0, tokens - cached * (n == column)) for n, tokens in enumerate(case.uncached))
    before, after = totals(case), totals(replace(case, uncached=fewer))
    assert after[column] * SAME <= before[column]
    assert [after[n] for n in range(NUM_COLUMNS) if n != column] == [
        before[n] for n in range(NUM_COLUMNS) if n != column
    ]


@property_test
@given(CASES, LOADS)
def test_a_booking_of_another_adapter_never_lowers_a_cost(case: Case, load: Load) -> None:
    if load.lora_id == case.lora_id:
        load = replace(load, lora_id=A if case.lora_id is None else None)
    extra = replace(load, answered=False)
    before, after = totals(case), totals(replace(case, loads=(*case.loads, extra)))
    assert all(more >= less * SAME for more, less in zip(after, before, strict=True))
    assert all(after[n] == before[n] for n in range(NUM_COLUMNS) if n != extra.column)


@property_test
@given(
    st.lists(st.tuples(st.one_of(st.integers(0, 50), st.integers(0, 5000)), st.integers(0, 2000)), max_size=4),
    st.integers(0, 3),
)
def test_a_booking_at_any_time_never_lowers_a_cost(prompts: list[tuple[int, int]], at: int) -> None:
    """Prompts as tokens, and ms until the next."""
    weights = CostWeights(prefill_tokens_per_s=1000.0, overhead_ms=0.001, decode_step_ms=1e-6)

    def cost(skipped: int | None) -> float:
        book, now_s = book_of(weights), 0.0
        for n, (tokens, waited_ms) in enumerate(prompts):
            if n != skipped:
                book.book(0, tokens=tokens, lora_id=B, now_s=now_s)
            now_s += waited_ms / 1000
        return float(ask(IDLE, book, now_s, [0])[0].total[0])

    assert cost(None) >= cost(at) * (1 - 1e-9)


@property_test
@given(CASES, LOADS, st.integers(1, 100_000), st.integers(0, 100_000))
def test_a_longer_prompt_in_the_queue_never_lowers_a_cost(case: Case, load: Load, tokens: int, kv_tokens: int) -> None:
    short = replace(load, answered=False)
    long = replace(short, tokens=short.tokens + tokens, kv_tokens=short.kv_tokens + kv_tokens)
    before, after = (totals(replace(case, loads=(*case.loads, last))) for last in (short, long))
    assert all(more >= less * SAME for more, less in zip(after, before, strict=True))


@property_test
@given(CASES)
def test_slots_and_swaps_are_those_of_a_plain_count(case: Case) -> None:
    book, now_s = loaded(case)
    _, rows = ask(case, book, now_s)
    for column in range(NUM_COLUMNS):
        used = [load.lora_id for load in case.loads if load.column == column]
        num_slots = case.num_slots[column]
        is_full = num_slots > 0 and case.lora_id not in used
        over = max(0, len(set(used)) + 1 - num_slots) if is_full else 0
        assert rows["slot"][column] == pytest.approx(over * book.slot_ms, abs=0.001)
        latest = list(dict.fromkeys(one for one in reversed(used) if one is not None))[:num_slots]
        is_swap = case.lora_id is not None and case.lora_id not in latest
        assert rows["swap"][column] == pytest.approx(case.weights.adapter_swap_ms * is_swap, abs=0.001)


@property_test
@given(CASES, st.lists(COLUMNS, min_size=1, max_size=5))
def test_a_candidates_cost_does_not_depend_on_the_others(case: Case, columns: list[int]) -> None:
    book, now_s = loaded(case)
    together, _ = ask(case, book, now_s + case.waited_s, columns)
    for i, column in enumerate(columns):
        alone, _ = ask(case, book, now_s + case.waited_s, [column])
        assert (alone.total[0], alone.row(0)) == (together.total[i], together.row(i))


@property_test
@given(CASES)
def test_estimating_changes_nothing(case: Case) -> None:
    book, now_s = loaded(case)
    before = book.state.tolist(), book.speed.log_ms.tolist(), book.slot_ms
    first, second = (ask(case, book, now_s)[1] for _ in range(2))
    assert first == second
    assert (book.state.tolist(), book.speed.log_ms.tolist(), book.slot_ms) == before


# -- term by term ------------------------------------------------------------------------------------------------

WEIGHTS = CostWeights(prefill_tokens_per_s=1000.0, overhead_ms=0.001)
IDLE = Case(
    loads=(),
    took_s=0.0,
    waited_s=0.0,
    weights=WEIGHTS,
    lora_id=None,
    uncached=(0,) * NUM_COLUMNS,
    num_slots=(2,) * NUM_COLUMNS,
    capacity=(np.inf,) * NUM_COLUMNS,
    max_running=(np.inf,) * NUM_COLUMNS,
    output_tokens=100.0,
)


def booked(column: int, lora_id: LoraId | None = None, *, tokens: int = 0, kv_tokens: int = 0) -> Load:
    return Load(column=column, tokens=tokens, lora_id=lora_id, kv_tokens=kv_tokens, answered=False)


def terms(case: Case) -> dict[str, list[float]]:
    """Terms that aren't zero everywhere."""
    book, now_s = loaded(case)
    _, rows = ask(case, book, now_s + case.waited_s)
    return {name: values for name, values in rows.items() if any(values)}


def test_nothing_to_do_on_an_idle_fleet_costs_nothing() -> None:
    assert terms(IDLE) == {}


def test_computing_costs_its_time_and_a_share_for_those_after() -> None:
    weights = CostWeights(prefill_tokens_per_s=2000.0, overhead_ms=0.001)
    assert terms(replace(IDLE, uncached=(0, 512, 2048), weights=weights)) == {
        "prefill": pytest.approx([0, 256, 1024], abs=0.01),
        "others": pytest.approx([0, 64, 256], abs=0.01),
    }


@pytest.mark.parametrize(("waited_s", "times"), [(0.0, 2.0), (120.0, 1.0), (240.0, 0.5)])
def test_others_lose_more_where_the_cache_was_filled_more_often_lately(waited_s: float, times: float) -> None:
    loads = (booked(1, kv_tokens=1500), booked(1, kv_tokens=500), booked(2, kv_tokens=2000))
    case = replace(
        IDLE, loads=loads, waited_s=waited_s, capacity=(1000.0, 1000.0, np.inf), uncached=(1024,) * NUM_COLUMNS
    )
    empty, filled, endless = terms(case)["others"]
    assert empty == endless > 0
    assert filled == pytest.approx(empty * (1 + times), rel=0.02)
    empty, filled, endless = terms(replace(case, uncached=(16,) * NUM_COLUMNS))["others"]
    assert empty == filled == endless > 0, "a short prompt stores next to nothing"


def test_slower_source_takes_longer() -> None:
    book = book_of(WEIGHTS)
    for took_ms in [1000.0, 3000.0] * 20:
        book.speed.observe(1 if took_ms > 2000 else 0, tokens=1024, ahead_ms=0.0, took_ms=took_ms)
    case = replace(IDLE, uncached=(1024,) * NUM_COLUMNS)
    fast, slow, unknown = ask(case, book, 0.0)[1]["prefill"]
    assert [fast, slow, unknown] == pytest.approx([book.speed.ms(column, 1024) for column in range(3)], abs=0.001)
    assert slow > 1.5 * fast
    assert fast < unknown < slow


@pytest.mark.parametrize(("waited_s", "queue_ms"), [(0.0, 3072), (1.0, 2072), (60.0, 3072 * MIN_QUEUE_SHARE)])
def test_booked_prompts_are_waited_for_less_what_was_computed_meanwhile(waited_s: float, queue_ms: float) -> None:
    loads = booked(1, tokens=1024), booked(1, tokens=2048)
    assert terms(replace(IDLE, loads=loads, waited_s=waited_s)) == {
        "queue": pytest.approx([0, queue_ms, 0], abs=0.01),
        "decode": pytest.approx([0, 10.2, 0]),
    }


def test_a_step_of_the_running_requests_comes_first() -> None:
    loads = [replace(booked(column, tokens=9), answered=True) for column in (0, 2, 2)]
    assert terms(replace(IDLE, loads=tuple(loads))) == {"decode": pytest.approx([10.1, 0, 10.2])}


def test_a_step_is_longer_with_longer_contexts_and_at_a_slower_source() -> None:
    book = book_of(WEIGHTS)
    book.book(0, tokens=0, context_tokens=100_000, lora_id=None, now_s=0.0)
    book.book(1, tokens=0, context_tokens=300_000, lora_id=None, now_s=0.0)
    book.book(2, tokens=0, context_tokens=100_000, lora_id=None, now_s=0.0)
    book.speed.factors[2] = 2.0
    assert ask(IDLE, book, 0.0)[1]["decode"] == pytest.approx([20.1, 40.1, 40.2])


@pytest.mark.parametrize(
    ("running", "num_slots", "over"),
    [
        ((), 1, 0),
        ((B,), 2, 0),
        ((B,), 1, 1),
        ((B, B), 2, 0),
        ((B, C), 2, 1),
        ((B, C), 1, 2),
        ((B, C), 0, 0),
        ((None,), 1, 1),
        ((None, B), 2, 1),
        ((A, B, C), 1, 0),
    ],
    ids=str,
)
def test_slot_is_waited_for_where_they_are_full_and_the_adapter_does_not_run(
    running: tuple[LoraId | None, ...], num_slots: int, over: int
) -> None:
    loads = tuple(booked(1, lora_id) for lora_id in running)
    case = replace(IDLE, loads=loads, num_slots=(num_slots,) * NUM_COLUMNS, lora_id=A)
    assert terms(case).get("slot", [0] * NUM_COLUMNS) == [0, 200 * over, 0]


def test_the_base_model_waits_for_a_slot_too() -> None:
    case = replace(IDLE, loads=(booked(0, A), booked(0, B), booked(1, A), booked(2, A), booked(2, None)))
    assert terms(case)["slot"] == [200, 0, 0]


def test_an_adapter_is_swapped_in_where_it_was_not_lately() -> None:
    loads = booked(0, A), booked(0, B), booked(0, C), booked(1, A), booked(1, B)
    assert terms(replace(IDLE, loads=loads, lora_id=A))["swap"] == [20, 0, 20]
    assert "swap" not in terms(replace(IDLE, loads=loads, lora_id=None))


@pytest.mark.parametrize(
    ("kv_tokens", "memory_ms"),
    [
        (0, 0),
        (700, 0),
        (701, 5000 / 701),
        (800, 5000 * 100 / 800),
        (1000, 5000 * 300 / 1000),
        (2000, 5000 * 1300 / 1000),
    ],
)
def test_memory_is_waited_for_where_prompt_and_output_do_not_fit(kv_tokens: int, memory_ms: float) -> None:
    capacity = (np.inf, 1000.0, 10_000.0)
    loads = tuple(booked(column, kv_tokens=kv_tokens) for column in range(NUM_COLUMNS))
    case = replace(IDLE, loads=loads, capacity=capacity, uncached=(200,) * NUM_COLUMNS)
    assert terms(case).get("memory", [0.0] * NUM_COLUMNS) == pytest.approx([0.0, memory_ms, 0.0], abs=0.001)


@pytest.mark.parametrize(("running", "batch_ms"), [(0, 0), (3, 0), (4, 5000 / 4), (6, 5000 * 3 / 4)])
def test_a_place_in_the_batch_is_waited_for_where_it_is_full(running: int, batch_ms: float) -> None:
    loads = tuple(booked(column) for column in range(NUM_COLUMNS) for _ in range(running))
    case = replace(IDLE, loads=loads, max_running=(np.inf, 4.0, 100.0))
    assert terms(case).get("batch", [0.0] * NUM_COLUMNS) == pytest.approx([0.0, batch_ms, 0.0], abs=0.001)


def test_fuller_cache_is_no_cheaper_for_a_request_that_fills_it() -> None:
    loads = tuple(booked(column, kv_tokens=kv_tokens) for column, kv_tokens in enumerate((10, 500, 2000)))
    case = replace(IDLE, loads=loads, capacity=(1000.0,) * NUM_COLUMNS, uncached=(950,) * NUM_COLUMNS)
    emptiest, fuller, fullest = terms(case)["memory"]
    assert emptiest <= fuller <= fullest


def test_each_candidate_is_asked_for_what_it_calls_the_adapter() -> None:
    """Column 0 runs the old weights A, still held by column 1; column 0 has B by now."""
    book, _ = loaded(replace(IDLE, loads=(booked(0, A),), num_slots=(1,) * NUM_COLUMNS))

    def slots(lora_ids: Sequence[LoraId]) -> list[float]:
        numbers = np.ones(len(lora_ids))
        demand = Demand(
            now_s=0.0,
            num_tokens=1,
            cached_tokens=np.zeros(len(lora_ids), np.int64),
            output_tokens=1.0,
            lora_ids=lora_ids,
            num_slots=np.ones(len(lora_ids), np.int64),
            capacity_tokens=numbers * np.inf,
            max_running=numbers * np.inf,
        )
        costs = estimate(book, WEIGHTS, np.arange(len(lora_ids)), demand)
        return [costs.row(i).get("slot", 0.0) for i in range(len(lora_ids))]

    assert slots([B]) == [200.0]
    assert slots([B, A]) == [200.0, 0.0]


def test_terms_that_are_zero_are_not_told() -> None:
    book, now_s = loaded(replace(IDLE, loads=(booked(1),)))
    costs, _ = ask(IDLE, book, now_s)
    assert [costs.row(i) for i in range(NUM_COLUMNS)] == [{}, {"decode": pytest.approx(10.1)}, {}]
