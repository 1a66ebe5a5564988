"""Claims of router/decode.py: it finds the three numbers, keeps to a guess where it must, and odd samples do little."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.decode import DecodeBook
from router.terms import step_ms

GUESS_MS = 10.0
SAMPLES = st.lists(
    st.tuples(st.floats(-1.0, 500.0), st.floats(0.0, 5e6), st.floats(allow_nan=True, allow_infinity=True)), max_size=40
)


def learned(book: DecodeBook, samples: int, truth: tuple[float, float, float], *, noise: float = 0.0) -> DecodeBook:
    """`book` after samples of batches of all sizes."""
    rng = random.Random(0)
    for _ in range(samples):
        requests = int(math.exp(rng.uniform(0, math.log(41))))
        context = requests * rng.uniform(0, 20_000)
        took_ms = float(np.dot(truth, (1, requests, context))) * math.exp(rng.gauss(0, noise))
        book.observe(requests=requests, context_tokens=context, took_ms=took_ms)
    return book


def test_nothing_runs_nothing_is_waited_for() -> None:
    assert step_ms(DecodeBook(step_ms=GUESS_MS).model, 0.0, 0.0) == 0.0


@pytest.mark.parametrize("truth", [(12.0, 0.05, 8e-5), (2.0, 0.5, 0.0), (60.0, 30.0, 1e-3), (0.5, 0.0, 1e-5)], ids=str)
def test_a_step_is_learned_by_batch_and_context(truth: tuple[float, float, float]) -> None:
    book = learned(DecodeBook(step_ms=GUESS_MS), 1000, truth, noise=0.2)
    for requests, context in ((1, 0), (1, 20_000), (8, 50_000), (40, 200_000), (40, 400_000)):
        expected = float(np.dot(truth, (1, requests, context)))
        assert step_ms(book.model, requests, context) == pytest.approx(expected, rel=0.25)
    assert book.num_samples == 1000


def test_what_the_samples_do_not_tell_apart_stays_in_proportion() -> None:
    book = DecodeBook(step_ms=GUESS_MS)
    for _ in range(200):
        book.observe(requests=1, context_tokens=0, took_ms=20.0)
    assert step_ms(book.model, 1, 0) == pytest.approx(20.0, rel=0.02)
    assert book.model[2] == pytest.approx(2 * GUESS_MS / 100_000, rel=0.02)


def test_it_follows_a_change() -> None:
    book = learned(DecodeBook(step_ms=GUESS_MS), 1000, (10.0, 0.1, 1e-5))
    learned(book, 1500, (30.0, 0.1, 1e-5))
    assert step_ms(book.model, 1, 0) == pytest.approx(30.0, rel=0.1)


def test_a_stall_moves_little() -> None:
    book = learned(DecodeBook(step_ms=GUESS_MS), 100, (10.0, 0.1, 1e-5))
    before = step_ms(book.model, 8, 0)
    book.observe(requests=8, context_tokens=0, took_ms=1e7)
    assert before <= step_ms(book.model, 8, 0) < 1.1 * before


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(SAMPLES)
def test_whatever_is_seen_a_step_is_finite_and_longer_with_more(samples: list[tuple[float, float, float]]) -> None:
    book = DecodeBook(step_ms=GUESS_MS)
    for requests, context, took_ms in samples:
        book.observe(requests=requests, context_tokens=context, took_ms=took_ms)
    assert np.isfinite(book.model).all()
    assert (book.model >= 0).all()
    assert step_ms(book.model, 1, 0) <= step_ms(book.model, 2, 0) <= step_ms(book.model, 2, 1000)
