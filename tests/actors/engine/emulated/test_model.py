"""The engine model: when each step ends, by hand from the profile, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.engine.emulated.profiles import PROFILES
from tests.actors.engine.emulated.driving import ONE_TOKEN_S, Engine, Model, Request, job
from tests.actors.engine.emulated.ledger import Ledger, hashes

# -- time of a prefill -------------------------------------------------------------------------------------------


def test_one_prompt_takes_what_the_formula_says() -> None:
    engine, one = Engine(), job("ab")
    engine.submit(one, at_s=10.0)
    assert (engine.model.is_prefilling, engine.model.waiting_tokens, engine.cache.held) == (True, 9, 0)

    # 1000 + 9 * 250 + 125 * 9 * 9/2 ms
    assert engine.step() == [(18.3125, one, 1)]

    assert (engine.ended, engine.model.next_s, engine.model.busy_s) == ([one], None, 8.3125)
    assert (one.cached, engine.model.computed_tokens, engine.cache.held) == (0, 9, 8)
    assert set(engine.ledger.parents) == set(hashes("ab"))
    assert engine.is_at_rest()


def test_prompts_that_wait_are_computed_together() -> None:
    one, other = job("a"), job("bc")
    engine = Engine().busy_with(one, other)

    # 1000 + (5 + 9) * 250 + 125 * (5 * 5/2 + 9 * 9/2) ms
    assert engine.step() == [(ONE_TOKEN_S + 11.125, one, 1), (ONE_TOKEN_S + 11.125, other, 1)]
    assert engine.ended[1:] == [one, other]


def test_what_is_cached_is_not_computed_but_attended_to() -> None:
    engine, again, longer = Engine(), job("ab"), job("abc")
    engine.submit(job("ab"))
    engine.run()

    engine.submit(again, at_s=10.0)
    engine.run()
    # 1000 + 250 + 125 * (8 + 1/2) ms
    assert (engine.now_s, again.cached, engine.model.computed_tokens) == (12.3125, 8, 10)

    engine.submit(longer)
    engine.run()
    # 1000 + 5 * 250 + 125 * 5 * (8 + 5/2) ms
    assert (engine.now_s, longer.cached, engine.cache.held) == (12.3125 + 8.8125, 8, 12)


def test_the_same_prompt_twice_in_a_batch_is_computed_twice_and_held_once() -> None:
    engine = Engine().busy_with(job("ab"), job("ab"))

    engine.run()

    assert (engine.model.computed_tokens, engine.cache.held) == (1 + 9 + 9, 8)
    assert engine.is_at_rest()


def test_adapters_share_nothing() -> None:
    engine, other = Engine(), job("ab", adapter="x")
    engine.submit(job("ab"))
    engine.run()

    engine.submit(other)
    engine.run()

    assert (other.cached, engine.cache.held) == (0, 16)


def test_the_last_token_is_always_computed() -> None:
    engine, again = Engine(), job("ab", 0)
    engine.submit(job("ab", 0))
    engine.run()

    engine.submit(again)
    engine.run()

    # of whole pages, as SGLang does, which looks for all but the last token
    assert (again.cached, engine.model.computed_tokens) == (4, 8 + 4)
    assert engine.is_at_rest()


# -- chunks ------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_each_stored_at_its_end() -> None:
    engine, long = Engine(chunk_tokens=8), job("abcde")
    engine.submit(long)
    assert (engine.model.pending(), engine.model.waiting) == ([long], [])

    # 1000 + 8 * 250 + 125 * 8 * 4 ms
    assert (engine.step(), engine.now_s, engine.cache.held) == ([], 7.0, 8)
    assert (engine.model.waiting_tokens, engine.model.computed_tokens) == (13, 16)
    # 1000 + 8 * 250 + 125 * 8 * (8 + 4) ms
    assert (engine.step(), engine.now_s, engine.cache.held) == ([], 7.0 + 15.0, 16)
    assert engine.model.pending() == []  # its first token is under way
    # 1000 + 5 * 250 + 125 * 5 * (16 + 5/2) ms
    assert engine.step() == [(7.0 + 15.0 + 13.8125, long, 1)]
    assert (engine.cache.held, engine.model.computed_tokens, engine.model.busy_s) == (20, 21, 35.8125)
    assert engine.is_at_rest()


def test_a_cut_prompt_goes_on_first_and_leaves_the_rest_of_the_step_to_others() -> None:
    engine, long, short, third = Engine(chunk_tokens=8), job("abc", 0), job(rest=3), job(rest=2)
    engine.submit(long)
    engine.submit(short, third)
    engine.step()

    # 1000 + 8 * 250 + 125 * (4 * (8 + 4/2) + 3 * 3/2 + 1 * 1/2) ms: one token of the third is computed
    assert engine.step() == [(7.0 + 8.625, long, 1), (7.0 + 8.625, short, 1)]
    assert (engine.model.is_prefilling, engine.model.waiting) == (True, [])
    # 1000 + 250 + 125 * (1 + 1/2) ms
    assert engine.step() == [(7.0 + 8.625 + 1.4375, third, 1)]


def test_a_step_is_full_at_its_tokens() -> None:
    one, other, third = job(rest=3), job(rest=5), job()
    engine = Engine(chunk_tokens=8).busy_with(one, other, third)

    assert engine.model.waiting == [third]
    assert [done for _, done, _ in engine.step()] == [one, other]
    assert [done for _, done, _ in engine.step()] == [third]


# -- decode ------------------------------------------------------------------------------------------------------


def test_decode_steps_take_what_the_formula_says() -> None:
    engine, one = Engine(), job("a", output=4)
    engine.submit(one)
    engine.step()
    start_s = engine.now_s
    assert (engine.model.is_prefilling, engine.model.running, one.emitted) == (False, [one], 1)

    # three of 500 + 125 + 31.25 * (5 + 1) ms
    assert engine.step() == [(start_s + 3 * 0.8125, one, 3)]
    assert engine.ended == [one]
    assert engine.is_at_rest()


def test_a_row_of_decode_steps_ends_with_the_shortest_request_and_at_most_after_max_steps() -> None:
    one, other = job(output=3), job(output=9)
    engine = Engine(max_steps=4).busy_with(one, other)
    engine.step()
    start_s = engine.now_s

    # two of 500 + 2 * 125 + 31.25 * (2 + 2) ms
    row_s = 2 * 0.875
    assert engine.step() == [(start_s + row_s, one, 2), (start_s + row_s, other, 2)]
    assert engine.ended[1:] == [one]
    # four of 500 + 125 + 31.25 * 4 ms
    assert engine.step() == [(start_s + row_s + 3.0, other, 4)]
    # two of 500 + 125 + 31.25 * 8 ms
    assert engine.step() == [(start_s + row_s + 3.0 + 1.75, other, 2)]
    assert engine.ended[1:] == [one, other]


@pytest.mark.parametrize(
    ("after_s", "num_steps"),
    [(0.0, 1), (0.25, 1), (0.6875, 1), (0.75, 2), (1.375, 2), (1.5, 3), (9 * 0.6875, 9)],
)
def test_who_comes_during_a_row_of_decode_steps_starts_after_the_step_under_way(after_s: float, num_steps: int) -> None:
    engine, one, new = Engine(), job(output=10), job()
    engine.submit(one)
    engine.step()

    engine.submit(new, at_s=ONE_TOKEN_S + after_s)
    engine.submit(job(rest=2), at_s=engine.now_s)  # a second one changes nothing

    # each of 500 + 125 + 31.25 * (1 + 1) ms
    assert engine.step() == [(ONE_TOKEN_S + num_steps * 0.6875, one, num_steps)]
    if num_steps < 9:
        assert engine.model.is_prefilling  # before the rest of the decoding
    assert next(done for _, done, _ in engine.step()) is new
    assert engine.run().model.busy_s == engine.now_s
    assert [sum(n for _, of, n in engine.out if of is done) for done in (one, new)] == [10, 1]


def test_who_comes_during_a_prefill_waits_for_its_end() -> None:
    engine, new = Engine(), job(rest=2)
    engine.submit(job("ab", output=5))

    engine.submit(new, at_s=1.0)

    assert (engine.model.next_s, engine.model.waiting, engine.model.waiting_tokens) == (8.3125, [new], 11)
    engine.step()
    # 1000 + 2 * 250 + 125 * 2 ms, and nothing is decoded meanwhile
    assert engine.step() == [(8.3125 + 1.75, new, 1)]


def test_an_instant_engine_does_all_at_once() -> None:
    ledger, jobs = Ledger(), [job("abc", output=200), job("ab", adapter="x", output=3)]
    model = Model(PROFILES["instant"], ledger.cache())
    for one in jobs:
        model.submit(one, 5.0)

    while model.next_s is not None:
        assert model.next_s == 5.0
        model.advance()

    assert ([one.emitted for one in jobs], model.busy_s, model.kv_tokens) == ([200, 3], 0.0, 1 << 20)


# -- abort -------------------------------------------------------------------------------------------------------


def waiting() -> tuple[Engine, Request]:
    engine, one = Engine(), job("ab")
    engine.submit(job(), one)
    return engine, one


def prefilling() -> tuple[Engine, Request]:
    engine, one = Engine(), job("ab")
    engine.submit(one)
    return engine, one


def cut() -> tuple[Engine, Request]:
    engine, one = Engine(chunk_tokens=5), job("abc")
    engine.submit(one)
    return engine, one


def cut_once_more() -> tuple[Engine, Request]:
    engine, one = cut()
    engine.step()
    return engine, one


def in_its_last_chunk() -> tuple[Engine, Request]:
    engine, one = cut_once_more()
    engine.step()
    return engine, one


def running() -> tuple[Engine, Request]:
    engine, one = Engine(), job("ab", output=9)
    engine.submit(one)
    engine.step()
    return engine, one


@pytest.mark.parametrize("stage", [waiting, prefilling, cut, cut_once_more, in_its_last_chunk, running])
def test_an_aborted_request_frees_all_it_had_after_the_step(
    stage: Callable[[], tuple[Engine, Request]],
) -> None:
    engine, one = stage()
    other = job("xy", adapter="x", output=2)
    engine.submit(other)
    before = list(engine.out)

    engine.model.abort(one, engine.now_s)
    assert one not in engine.model.waiting
    engine.step()
    assert one not in [*engine.model.running, *engine.model.pending()]
    assert other not in engine.model.waiting  # next

    engine.run()
    assert one not in [done for _, done, _ in engine.out[len(before) :]]
    assert one not in engine.ended
    assert other.emitted == 2
    assert engine.is_at_rest()


def test_aborting_all_leaves_an_idle_engine() -> None:
    engine, one = running()
    other = job("a")
    engine.submit(other)

    engine.model.abort(one, engine.now_s)
    engine.model.abort(other, engine.now_s)
    engine.step()

    assert engine.model.next_s is None
    assert engine.is_at_rest()


def test_an_abort_ends_a_row_of_decode_steps_after_the_step_under_way() -> None:
    one, other = job(output=20, adapter="x"), job(adapter="y")
    engine = Engine(num_slots=1)
    engine.submit(one)
    engine.submit(other)
    engine.step()
    start_s = engine.now_s

    engine.now_s += 1.0
    engine.model.abort(one, engine.now_s)

    # the second of 500 + 125 + 31.25 * (1 + 1) ms
    assert (engine.step(), engine.now_s) == ([], start_s + 2 * 0.6875)
    assert [done for _, done, _ in engine.step()] == [other]
