"""The speed book learns what engines take, whatever else befalls single requests, and is never absurd."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.speed import SpeedBook
from router.terms import FIRST, NUM_KNOTS

Law = Callable[[int], float]

LENGTHS = (16, 17, 23, 32, 45, 100, 700, 1024, 3000, 5000, 12_000, 50_000, 100_000, 131_072)
"""Where curves are looked at: knots, between them, and the ends."""
LAST = 2 ** (FIRST + NUM_KNOTS - 1)
NUM_SAMPLES = 4000
TOLERANCE = 0.15


def book_of(num_columns: int = 1) -> SpeedBook:
    book = SpeedBook(tokens_per_s=5000.0, overhead_ms=5.0)
    book.widen(num_columns)
    return book


def law(overhead_ms: float, ms_per_token: float, ms_per_pair: float) -> Law:
    """What a prompt takes: overhead, layers that see each token, attention that sees each pair."""
    return lambda tokens: overhead_ms + ms_per_token * tokens + ms_per_pair * tokens**2


LAWS = {
    "as assumed": law(5.0, 0.2, 0.0),
    "large GPU": law(15.0, 0.02, 1e-6),
    "attention": law(40.0, 0.1, 2e-5),
    "tiny model": law(0.5, 0.001, 1e-8),
    "CPU": law(200.0, 1.0, 0.0),
}
A_LAW = law(15.0, 0.05, 1e-6)


def lengths(rng: random.Random, num_samples: int = NUM_SAMPLES) -> list[int]:
    """Prompt lengths, all sizes alike."""
    return [int(2 ** rng.uniform(FIRST, FIRST + NUM_KNOTS - 1)) for _ in range(num_samples)]


def observe(book: SpeedBook, tokens: int, took_ms: float, *, column: int = 0) -> None:
    book.observe(column, tokens=tokens, ahead_ms=0.0, took_ms=took_ms)


def learned(a_law: Law, num_columns: int = 1) -> SpeedBook:
    """A book that has seen the law at every column."""
    book = book_of(num_columns)
    for n, tokens in enumerate(lengths(random.Random(1))):
        observe(book, tokens, a_law(tokens), column=n % num_columns)
    return book


def worst_error(book: SpeedBook, a_law: Law, *, column: int = 0) -> float:
    """Largest relative error of the column's curve."""
    return max(abs(book.ms(column, tokens) / a_law(tokens) - 1) for tokens in LENGTHS)


def curves(book: SpeedBook) -> list[list[float]]:
    return [[book.ms(column, tokens) for tokens in LENGTHS] for column in range(len(book.factors))]


# -- what is learned ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outliers", [(), (30.0, 100.0), (0.01,), (0.01, 100.0)], ids=["clean", "late", "early", "both"]
)
@pytest.mark.parametrize("name", LAWS)
def test_true_curve_is_learned_beside_wild_outliers(name: str, outliers: tuple[float, ...]) -> None:
    a_law, rng, book = LAWS[name], random.Random(3), book_of()
    for tokens in lengths(rng):
        wild = rng.choice(outliers) if outliers and rng.random() < 0.1 else 1.0
        observe(book, tokens, a_law(tokens) * wild)
    assert worst_error(book, a_law) < (TOLERANCE if outliers else 0.02)


def test_true_curve_is_learned_from_noise() -> None:
    rng, book = random.Random(3), book_of()
    for tokens in lengths(rng):
        observe(book, tokens, A_LAW(tokens) * math.exp(rng.gauss(0.0, 0.2)))
    assert worst_error(book, A_LAW) < TOLERANCE


def test_true_curve_is_learned_from_prompts_that_wait_for_others() -> None:
    rng, book = random.Random(3), book_of()
    for tokens in lengths(rng):
        ahead = lengths(rng, rng.randrange(4))
        took_ms = A_LAW(tokens) + sum(map(A_LAW, ahead))
        book.observe(0, tokens=tokens, ahead_ms=sum(book.ms(0, one) for one in ahead), took_ms=took_ms)
    assert worst_error(book, A_LAW) < TOLERANCE


@pytest.mark.parametrize("few", [(478, 676), (30, 42), (480, 500, 600, 680)], ids=str)
@pytest.mark.parametrize("a_law", [law(20.0, 0.0, 0.0), law(15.0, 0.02, 0.0)], ids=["flat", "affine"])
def test_prompts_of_a_few_lengths_do_not_bend_the_curve_away(a_law: Law, few: tuple[int, ...]) -> None:
    rng, book = random.Random(1), book_of()
    for _ in range(NUM_SAMPLES):
        tokens = rng.choice(few)
        observe(book, tokens, a_law(tokens) * math.exp(rng.gauss(0.0, 0.1)))
    assert max(abs(book.ms(0, tokens) / a_law(tokens) - 1) for tokens in few) < TOLERANCE


def test_curve_follows_when_the_fleet_changes() -> None:
    book = learned(A_LAW)
    for tokens in lengths(random.Random(2)):
        observe(book, tokens, 3 * A_LAW(tokens))
    assert worst_error(book, lambda tokens: 3 * A_LAW(tokens)) < TOLERANCE


def test_factor_of_a_slower_source_is_found() -> None:
    book = book_of(3)
    for n, tokens in enumerate(lengths(random.Random(3))):
        observe(book, tokens, A_LAW(tokens) * (3.0 if n % 3 == 2 else 1.0), column=n % 3)
    fast, same, slow = book.factors.tolist()
    assert slow / fast == pytest.approx(3.0, rel=0.05)
    assert same / fast == pytest.approx(1.0, rel=0.05)
    assert [worst_error(book, A_LAW, column=column) < 0.05 for column in (0, 1)] == [True, True]
    assert worst_error(book, lambda tokens: 3 * A_LAW(tokens), column=2) < 0.05


def test_factor_of_a_slower_newcomer_is_found_within_fifty_requests() -> None:
    book = learned(A_LAW, num_columns=3)
    book.widen(1)
    for n, tokens in enumerate(lengths(random.Random(4), 200)):
        observe(book, tokens, A_LAW(tokens) * (3.0 if n % 4 == 3 else 1.0), column=n % 4)
    assert worst_error(book, lambda tokens: 3 * A_LAW(tokens), column=3) < TOLERANCE
    assert worst_error(book, A_LAW, column=0) < TOLERANCE


@pytest.mark.parametrize("scatter", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("samples", [1, 3, 10, 30, 100])
def test_sources_that_differ_by_chance_cost_the_same(samples: int, scatter: float) -> None:
    """Else whoever had bad luck is asked less, and hardly ever shows that it is as fast as the others."""
    spreads = []
    for seed in range(10):
        rng, book = random.Random(seed), book_of(8)
        for n in range(samples * 8):
            observe(book, 600, 150.0 * math.exp(rng.gauss(0.0, scatter)), column=n % 8)
        spreads.append(float(book.factors.max() / book.factors.min()))
    assert sorted(spreads)[len(spreads) // 2] < 1.02, spreads
    assert max(spreads) < 1.25, spreads


def test_sources_that_differ_more_than_by_chance_are_told_apart_early() -> None:
    rng, book = random.Random(5), book_of(4)
    for n in range(10 * 4):
        slower = 3.0 if n % 4 == 3 else 1.0
        observe(book, 600, 150.0 * slower * math.exp(rng.gauss(0.0, 0.2)), column=n % 4)
    assert book.factors[3] / book.factors[:3].max() > 1.8, book.factors


@pytest.mark.parametrize("took_ms", [5e-324, 1e-9, 1e9, 1e308], ids=str)
def test_one_stall_moves_little(took_ms: float) -> None:
    book = learned(A_LAW, num_columns=2)
    before = np.array(curves(book))
    observe(book, 5000, took_ms)
    ratios = np.array(curves(book)) / before
    assert (np.abs(np.log(ratios)) < 0.06).all()
    assert (np.sign(ratios[0] - 1) == (1 if took_ms > 1 else -1)).any()


def test_surprise_behind_others_says_little_of_the_prompt_itself() -> None:
    moved = []
    for ahead_ms in (0.0, 100_000.0):
        book = learned(A_LAW)
        own_ms = book.ms(0, 1000)
        book.observe(0, tokens=1000, ahead_ms=ahead_ms, took_ms=2 * (own_ms + ahead_ms))
        moved.append(math.log(book.ms(0, 1000) / own_ms))
    assert moved[0] > 3 * moved[1] > 0


def test_lengths_never_seen_keep_their_place_to_those_seen() -> None:
    book, fresh = book_of(), book_of()
    for took_ms in [100.0] + [400.0] * 200:
        observe(book, 1024, took_ms)
    assert book.ms(0, 1024) == pytest.approx(400.0, rel=0.02)
    for tokens in (16, 100, 700, 5000, 100_000):
        place = fresh.ms(0, tokens) / fresh.ms(0, 1024)
        assert book.ms(0, tokens) / book.ms(0, 1024) == pytest.approx(place, rel=0.02)


# -- the first sample --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 16, 1000, 1024, 300_000])
@pytest.mark.parametrize("times", [1 / 200, 1.0, 200.0])
def test_first_sample_sets_the_scale_of_all_lengths_and_sources(tokens: int, times: float) -> None:
    book, fresh = book_of(2), book_of(2)
    observe(book, tokens, fresh.ms(0, tokens) * times, column=1)
    assert np.array(curves(book)) == pytest.approx(np.array(curves(fresh)) * times)
    assert book.factors.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("times", "believed"), [(1e-6, 1 / 256), (1e6, 256.0)])
def test_first_sample_is_believed_within_bounds(times: float, believed: float) -> None:
    book, fresh = book_of(), book_of()
    observe(book, 1000, fresh.ms(0, 1000) * times)
    assert book.ms(0, 1000) == pytest.approx(fresh.ms(0, 1000) * believed)


def test_second_sample_sets_no_scale() -> None:
    book = book_of()
    observe(book, 1000, 100.0)
    observe(book, 1000, 1000.0)
    assert 100.0 < book.ms(0, 1000) < 1000.0


@pytest.mark.parametrize(
    ("tokens", "took_ms"),
    [(0, 50.0), (-7, 50.0), (1000, 0.0), (1000, -5.0), (1000, math.inf), (1000, math.nan)],
)
def test_samples_that_tell_nothing_are_ignored(tokens: int, took_ms: float) -> None:
    book = learned(A_LAW)
    before = curves(book), book.factors.tolist(), book.num_samples(0)
    observe(book, tokens, took_ms)
    assert (curves(book), book.factors.tolist(), book.num_samples(0)) == before
    observe(fresh := book_of(), tokens, took_ms)
    assert (curves(fresh), fresh.num_samples(0)) == (curves(book_of()), 0)


# -- columns -----------------------------------------------------------------------------------------------------


def test_reset_forgets_the_factor_of_one_column_and_keeps_the_curve() -> None:
    book = book_of(3)
    for n, tokens in enumerate(lengths(random.Random(3), 600)):
        observe(book, tokens, A_LAW(tokens) * (1 + n % 3), column=n % 3)
    before, curve = curves(book), book.log_ms.tolist()
    book.reset(2)
    assert (book.factors[2], [book.num_samples(column) for column in range(3)]) == (1.0, [200, 200, 0])
    assert (curves(book)[:2], book.log_ms.tolist()) == (before[:2], curve)
    observe(book, 1000, book.ms(2, 1000), column=2)
    assert book.factors[2] == pytest.approx(1.0, rel=0.15)


def test_source_that_has_shown_nothing_is_taken_for_an_average_one() -> None:
    book = book_of(3)
    for n, tokens in enumerate(lengths(random.Random(3))):
        observe(book, tokens, A_LAW(tokens) * (4.0 if n % 2 else 1.0), column=n % 2)
    assert worst_error(book, lambda tokens: 2 * A_LAW(tokens), column=2) < 0.05


def test_widening_keeps_what_was_learned() -> None:
    book = learned(A_LAW, num_columns=2)
    before = curves(book)
    book.widen(2)
    assert curves(book)[:2] == before
    assert [book.num_samples(column) for column in range(4)] == [NUM_SAMPLES // 2, NUM_SAMPLES // 2, 0, 0]


# -- the curve's ends --------------------------------------------------------------------------------------------


def test_nothing_to_compute_takes_no_time_and_few_tokens_as_long_as_sixteen() -> None:
    book = learned(A_LAW)
    assert [book.ms(0, 0), book.ms(0, -3)] == [0.0, 0.0]
    assert book.ms(0, 1) == book.ms(0, 16) == pytest.approx(A_LAW(16), rel=0.05)


def test_beyond_the_last_knot_time_grows_with_the_length() -> None:
    book = learned(A_LAW)
    assert [book.ms(0, LAST * n) / book.ms(0, LAST) for n in (1, 2, 3, 8)] == pytest.approx([1, 2, 3, 8])
    observe(fresh := book_of(), 4 * LAST, 4000.0)
    assert fresh.ms(0, 4 * LAST) == pytest.approx(4000.0)


def test_speed_is_told_at_the_longest_prompts_seen() -> None:
    book = book_of()
    assert book.tokens_per_s(0) == pytest.approx(5000.0, rel=0.01)
    for tokens in (64, 1024, 64):
        observe(book, tokens, 100.0)
    assert book.tokens_per_s(0) == pytest.approx(1024 / book.ms(0, 1024) * 1000)


# -- whatever the samples ----------------------------------------------------------------------------------------

SAMPLES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.one_of(st.integers(0, 300_000), st.sampled_from(LENGTHS)),
        st.one_of(st.just(0.0), st.floats(0.0, 1e7)),
        st.floats(-6.0, 9.0).map(lambda exponent: 10.0**exponent),
        st.sampled_from([False] * 9 + [True]),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=80, derandomize=True, database=None)
@given(SAMPLES)
def test_curve_is_finite_positive_and_rising(samples: list[tuple[int, int, float, float, bool]]) -> None:
    book = book_of(3)
    known: set[int] = set()
    for column, tokens, ahead_ms, took_ms, gone in samples:
        book.observe(column, tokens=tokens, ahead_ms=ahead_ms, took_ms=took_ms)
        known |= {column} if tokens else set()
        if gone:
            book.reset(column)
            known.discard(column)
        assert np.isfinite(book.log_ms).all()
        assert (np.diff(book.log_ms) >= 0).all()
        assert (np.isfinite(book.factors) & (book.factors > 0)).all()
        assert {n for n in range(3) if book.num_samples(n)} == known
        if tokens and not gone:  # what all have in common is the curve's
            known_factors = book.factors[sorted(known)]
            assert known_factors.min() <= 1 + 1e-9
            assert known_factors.max() >= 1 - 1e-9
    for curve in curves(book):
        assert np.isfinite(curve).all()
        assert min(curve) > 0
        assert all(longer >= shorter * (1 - 1e-9) for shorter, longer in itertools.pairwise(curve))


@settings(deadline=None, max_examples=25, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(1, 140_000), st.floats(1.0, 1e4)), min_size=1, max_size=4))
def test_samples_that_repeat_keep_the_curve_near_them(samples: list[tuple[int, float]]) -> None:
    book = book_of()
    for tokens, took_ms in samples * 400:
        observe(book, tokens, took_ms)
    took = [took_ms for _, took_ms in samples]
    for tokens, _ in samples:
        assert min(took) / 4 <= book.ms(0, tokens) <= max(took) * 4
