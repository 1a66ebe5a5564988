"""Who gets into a batch of the engine model: first come first served, slots for adapters, room in the KV cache."""

from __future__ import annotations

from tests.actors.engine.emulated.driving import ONE_TOKEN_S, PROFILE, Engine, Request, job
from tests.actors.engine.emulated.ledger import hashes


def firsts(engine: Engine) -> list[Request]:
    """Whose first token came in one step."""
    return [one for _, one, _ in engine.step()]


# -- slots for adapters ------------------------------------------------------------------------------------------


def test_whose_adapter_finds_no_slot_is_passed_over_and_blocks_nobody() -> None:
    x, y, z = job(output=9, adapter="x"), job(output=4, adapter="y"), job(adapter="z")
    base, x_again = job(), job(adapter="x")
    engine = Engine(num_slots=2).busy_with(x, y, z, base, x_again)

    assert firsts(engine) == [x, y, x_again]
    assert engine.model.waiting == [z, base]  # the base model takes a slot like any other

    engine.step()
    assert engine.ended[1:] == [x_again, y]
    assert firsts(engine) == [z]
    assert engine.model.running == [x]
    assert firsts(engine) == [base]
    assert engine.run().is_at_rest()


def test_one_slot_serves_one_adapter_at_a_time() -> None:
    x, base, x_again = job(output=3, adapter="x"), job(), job(output=2, adapter="x")
    engine = Engine(num_slots=1).busy_with(x, base, x_again)

    assert firsts(engine) == [x, x_again]
    engine.run()

    assert engine.ended[1:] == [x_again, x, base]


def test_an_adapter_whose_prompt_is_cut_has_its_slot() -> None:
    x, y = job("abcd", adapter="x"), job(adapter="y")
    engine = Engine(num_slots=1, chunk_tokens=8)
    engine.submit(x, y)

    assert (firsts(engine), firsts(engine), firsts(engine)) == ([], [], [x])  # the last two steps had room for y
    assert firsts(engine) == [y]


def test_without_a_limit_all_adapters_are_served_together() -> None:
    jobs = [job(adapter=name) for name in "stuvwxyz"]
    engine = Engine().busy_with(*jobs)

    assert firsts(engine) == jobs


def test_each_swap_takes_its_time() -> None:
    x, y = job(adapter="x"), job(adapter="y")
    engine = Engine(num_slots=3).busy_with(x, y, job(adapter="x"), job())

    engine.step()

    # 1000 + 4 * 250 + 125 * 4 * 1/2 + 2 * 2000 ms; the base model is there without
    assert (engine.now_s, engine.model.swaps) == (ONE_TOKEN_S + 6.25, 2)
    engine.submit(job(adapter="x"))
    engine.run()
    assert (engine.now_s, engine.model.swaps) == (ONE_TOKEN_S + 6.25 + ONE_TOKEN_S, 2)


def test_the_adapter_that_is_unused_for_longest_leaves_its_slot() -> None:
    engine = Engine(num_slots=2)
    swaps = []
    for name in "xyxzxyz":
        before = engine.model.swaps
        engine.submit(job(adapter=name))
        engine.run()
        swaps.append(engine.model.swaps - before)

    assert swaps == [1, 1, 0, 1, 0, 1, 1]


def test_decoding_is_use_of_a_slot() -> None:
    x, y = job(output=9, adapter="x"), job(output=2, adapter="y")
    engine = Engine(num_slots=2)
    engine.submit(x)
    engine.step()
    engine.submit(y)
    engine.run()
    assert engine.ended == [y, x]

    engine.submit(job(adapter="z"))  # y was unused for longer
    engine.run()
    engine.submit(job(adapter="x"))
    engine.run()

    assert engine.model.swaps == 3


def test_the_base_model_leaves_its_slot_last() -> None:
    engine = Engine(num_slots=2)
    for name in (None, "x", "y", "x"):
        engine.submit(job(adapter=name))
        engine.run()

    assert engine.model.swaps == 3  # y in place of x, and x again in place of y


def test_an_adapter_in_use_keeps_its_slot() -> None:
    x, others = job(output=60, adapter="x"), [job(adapter="y"), job(adapter="z")]
    engine = Engine(num_slots=2, max_steps=1)
    engine.submit(x)
    engine.step()
    for other in others:
        engine.submit(other)
        while other.emitted == 0:
            engine.step()
    assert (engine.model.swaps, engine.model.running) == (3, [x])

    engine.submit(job(adapter="x"))
    engine.run()

    assert engine.model.swaps == 3


# -- room --------------------------------------------------------------------------------------------------------


def test_the_longest_unused_pages_make_room() -> None:
    engine = Engine(kv_tokens=32)
    for pages in ("abc", "xyz"):
        engine.submit(job(pages))
        engine.run()
    assert engine.cache.held == 24

    engine.submit(job("pqr", output=3))  # 16 tokens: 8 are missing

    assert engine.ledger.removed == [hashes("abc")[2], hashes("abc")[1]]
    engine.run()
    assert set(engine.ledger.parents) == {hashes("a")[0], *hashes("xyz"), *hashes("pqr")}


def test_no_more_is_given_up_than_a_batch_lacks() -> None:
    engine = Engine(kv_tokens=32)
    for pages in ("abc", "xyz"):
        engine.submit(job(pages))
        engine.run()

    engine.busy_with(job("pqr", output=3), job(rest=3, output=5))  # 24 + 16 + 8 tokens: 16 are missing

    assert set(engine.ledger.parents) == set(hashes("xy"))
    assert engine.run().is_at_rest()


def test_what_a_request_reuses_is_not_given_up_for_it() -> None:
    engine, one = Engine(kv_tokens=32), job("abcdef", output=7)
    for pages in ("abc", "xyz"):
        engine.submit(job(pages))
        engine.run()

    engine.submit(one)

    assert one.cached == 12
    assert engine.ledger.removed == list(hashes("xyz"))[::-1]
    assert engine.run().cache.held == 24


def test_the_last_token_of_the_output_is_not_stored() -> None:
    engine = Engine()
    for output, held in ((7, 8), (8, 12)):
        one = job("a", output=output)
        one.prompt = hashes("abc")
        engine.submit(one)
        assert engine.run().cache.held == held


def test_what_is_known_of_the_output_is_stored_and_given_up_like_all_else() -> None:
    engine, one = Engine(kv_tokens=32), job("a", output=8)
    one.prompt = hashes("abc")
    engine.submit(one)
    assert engine.run().cache.held == 12
    assert engine.is_at_rest()

    engine.submit(job("uvwxyz", output=7))

    assert engine.run().ledger.removed == list(hashes("abc"))[::-1]


def test_who_finds_no_room_waits_for_it_and_those_behind_too() -> None:
    one, large, small = job("ab", 0, output=8), job("xyz", 0, output=6), job()
    engine = Engine(kv_tokens=32).busy_with(one, large, small)

    assert firsts(engine) == [one]
    assert (engine.model.waiting, engine.cache.held, engine.model.private_tokens) == ([large, small], 8, 8)
    engine.step()
    assert engine.ended[1:] == [one]
    assert firsts(engine) == [large, small]


def test_room_for_all_of_the_output_is_set_aside() -> None:
    one, other = job(output=20), job(output=11)
    engine = Engine(kv_tokens=32).busy_with(one, other)

    assert firsts(engine) == [one]  # 1 + 20 + 1 + 11 tokens are one too many


def test_a_started_page_takes_room_that_no_page_of_the_cache_does() -> None:
    one, large = job("a", 3, output=9), job(rest=8, output=9)
    engine = Engine(kv_tokens=32).busy_with(one, large)

    assert firsts(engine) == [one]
    assert (engine.cache.held, engine.model.private_tokens) == (4, 3 + 9)
    assert engine.model.waiting == [large]  # 16 + 17 tokens are one too many


def test_room_is_taken_to_the_last_token() -> None:
    one, other = job(output=20), job(output=10)
    engine = Engine(kv_tokens=32).busy_with(one, other)

    assert firsts(engine) == [one, other]


def test_a_request_larger_than_the_cache_is_served_alone() -> None:
    one, large, other = job(output=3), job("abcd"), job()
    engine = Engine(kv_tokens=12).busy_with(one, large, other)

    assert firsts(engine) == [one]
    engine.step()
    assert engine.model.running == []
    assert firsts(engine) == [large]
    assert firsts(engine) == [other]


def test_no_more_run_than_max_running() -> None:
    one, other, third = job(output=9), job(output=4), job()
    engine = Engine(max_running=2)
    for each in (one, other, third):
        engine.submit(each)
        engine.step()
    assert (engine.model.running, engine.model.waiting) == ([one, other], [third])

    while other in engine.model.running:
        engine.step()

    assert firsts(engine) == [third]


def test_no_more_are_taken_at_once_than_may_run() -> None:
    jobs = [job(output=9), job(), job(output=9), job()]
    engine = Engine(max_running=2).busy_with(*jobs)

    assert firsts(engine) == jobs[:2]
    assert firsts(engine) == [jobs[2]]
    assert engine.model.running == [jobs[0], jobs[2]]


def test_room_and_limits_are_the_profiles_unless_told() -> None:
    assert (Engine().model.kv_tokens, Engine(kv_tokens=7).model.kv_tokens) == (PROFILE.kv_tokens, 7)
