"""Claims of router/choice.py: the least cost, the fewest running, a fair lot, and a log that can be decided again."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.choice import MAX_SHARE_MS, NEAR_TIE_MS, NEAR_TIE_SHARE, LoggedDecision, choose, left_out, replay
from router.cost import CostWeights
from router.predict import UNKNOWN
from tests.router.decision_history import History

SEEDS = st.integers(0, 2**64 - 1)
SPLITMIX64 = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)
"""The generator's first numbers from SPLITMIX64_SEED, as others print them."""
SPLITMIX64_SEED = 1234567


def chosen(
    costs: list[float],
    running: list[float],
    out: list[bool] | None = None,
    *,
    cached: list[int] | None = None,
    seed: int = 0,
    number: int = 0,
) -> int:
    return choose(
        np.array(costs, float),
        np.array(running, float),
        np.array(cached or [0] * len(costs)),
        np.array(out or [False] * len(costs)),
        seed=seed,
        number=number,
    )


def lots(num_equal: int, seed: int, numbers: range) -> list[int]:
    return [chosen([7.0] * num_equal, [1.0] * num_equal, seed=seed, number=number) for number in numbers]


# -- whoever was left out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "running", "sent", "out"),
    [
        ([0, 0, 0], [3, 2, 0], [10, 10, 0], [False, False, True]),  # new, and what is asked nobody has
        ([500, 500, 0], [3, 2, 0], [10, 10, 0], [False, False, True]),  # new, and all others have it
        ([500, 240, 0], [3, 2, 0], [10, 10, 0], [False, False, False]),  # a conversation of the first one's
        ([500, 500, 0], [3, 2, 1], [10, 10, 0], [False, False, False]),  # it has something to do
        ([500, 500, 0], [3, 2, 0], [10, 10, 5], [False, False, False]),  # it gets its share
        ([500, 500, 0], [3, 2, 0], [2, 1, 0], [False, False, False]),  # there is little to be shared
    ],
)
def test_left_out_is_who_stands_idle_while_others_are_sent_what_anybody_could_answer(
    cached: list[int], running: list[float], sent: list[float], out: list[bool]
) -> None:
    assert left_out(np.array(cached), np.array(running, float), np.array(sent, float)).tolist() == out


def test_who_was_left_out_is_taken_as_long_as_that_costs_little() -> None:
    assert chosen([10.0, 10.0 + MAX_SHARE_MS], [0, 0], [False, True]) == 1
    assert chosen([10.0, 11.0 + MAX_SHARE_MS], [0, 0], [False, True]) == 0
    assert chosen([10.0, 300.0, 200.0], [0, 0, 0], [False, True, True]) == 2


# -- one choice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "running", "index"),
    [
        ([5.0], [9.0], 0),
        ([5.0, 4.0, 6.0], [0.0, 9.0, 0.0], 1),
        ([10.0, 10.0 + NEAR_TIE_MS], [1.0, 0.0], 1),
        ([10.0, 10.01 + NEAR_TIE_MS], [1.0, 0.0], 0),
        ([1000.0, 1000.0 * (1 + NEAR_TIE_SHARE) - 0.01], [1.0, 0.0], 1),
        ([1000.0, 1000.0 * (1 + NEAR_TIE_SHARE) + 0.01], [1.0, 0.0], 0),
        ([3.0, 3.1, 3.2, 9.0], [2.0, 1.0, 2.0, 0.0], 1),
        ([0.0, 0.0, 0.4], [1.0, 1.0, 0.0], 2),
    ],
)
def test_least_cost_then_the_fewest_running_of_those_as_near(
    costs: list[float], running: list[float], index: int
) -> None:
    assert {chosen(costs, running, seed=seed, number=3) for seed in range(50)} == {index}


@pytest.mark.parametrize(
    ("costs", "running", "cached", "index"),
    [
        ([3.0, 3.0, 3.0], [0, 0, 0], [16, 32, 0], 1),
        ([3.0, 3.2, 3.0], [0, 0, 0], [16, 32, 0], 1),  # cheaper by less than an estimate tells
        ([3.0, 3.0, 3.0], [0, 1, 0], [16, 32, 0], 0),
        ([3.0, 3.0, 4.0], [0, 0, 0], [16, UNKNOWN, 32], 0),
    ],
)
def test_of_equals_whoever_has_most_of_it(
    costs: list[float], running: list[float], cached: list[int], index: int
) -> None:
    assert {chosen(costs, running, cached=cached, seed=seed) for seed in range(20)} == {index}


CANDIDATES = st.lists(
    st.tuples(st.one_of(st.integers(0, 8).map(lambda n: n / 4), st.floats(0.0, 1e5)), st.integers(0, 3)), min_size=1
)


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(CANDIDATES, SEEDS, st.integers(0, 10**9))
def test_it_is_one_of_the_fewest_running_among_the_nearest(
    candidates: list[tuple[float, int]], seed: int, number: int
) -> None:
    costs, running = [cost for cost, _ in candidates], [float(n) for _, n in candidates]
    limit = min(costs) + max(NEAR_TIE_MS, min(costs) * NEAR_TIE_SHARE)
    fewest = min(n for cost, n in candidates if cost <= limit)
    allowed = {i for i, (cost, n) in enumerate(candidates) if cost <= limit and n == fewest}
    index = chosen(costs, running, seed=seed, number=number)
    assert index in allowed
    assert index == chosen(costs, running, seed=seed, number=number)


# -- the lot -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_equal", [2, 3, 8, 1000])
def test_the_lot_is_splitmix64_so_that_old_logs_can_be_replayed(num_equal: int) -> None:
    assert lots(num_equal, SPLITMIX64_SEED, range(5)) == [word % num_equal for word in SPLITMIX64]


def test_the_lot_falls_among_equals_only() -> None:
    picks = {chosen([9.0, 3.0, 3.2, 3.0, 3.4], [0.0, 1.0, 1.0, 2.0, 1.0], number=n) for n in range(64)}
    assert picks == {1, 2, 4}


@settings(deadline=None, max_examples=25, derandomize=True, database=None)
@given(SEEDS, st.integers(2, 9), st.integers(0, 10**12))
def test_lots_are_spread_evenly_whatever_the_seed(seed: int, num_equal: int, first: int) -> None:
    """Pearson's statistic far beyond what chance does (a millionth for the most degrees of freedom here)."""
    num_draws = 200 * num_equal
    draws = lots(num_equal, seed, range(first, first + num_draws))
    for found in (draws, draws[::2]):
        expected = len(found) / num_equal
        counts = Counter(found)
        assert sum((counts[i] - expected) ** 2 / expected for i in range(num_equal)) < 45


@settings(deadline=None, max_examples=25, derandomize=True, database=None)
@given(SEEDS, SEEDS)
def test_routers_with_other_seeds_draw_other_lots(seed: int, other: int) -> None:
    assert lots(4, seed, range(64)) == lots(4, seed, range(64))
    assert (lots(4, seed, range(64)) == lots(4, other, range(64))) is (seed == other)


# -- replay ------------------------------------------------------------------------------------------------------

WEIGHTS = st.sampled_from(
    [CostWeights(), CostWeights(decode_step_ms=100 * NEAR_TIE_MS), CostWeights(decode_step_ms=0.1)]
)


def through_json(log: list[LoggedDecision]) -> list[LoggedDecision]:
    return msgspec.json.decode(msgspec.json.encode(log), type=list[LoggedDecision])


@settings(deadline=None, max_examples=25, derandomize=True, database=None)
@given(st.integers(0, 2**32), WEIGHTS)
def test_what_a_router_decided_is_decided_again(seed: int, weights: CostWeights) -> None:
    history = History(seed, weights)
    history.go_on(150)
    log = history.core.decisions()
    assert [entry.number for entry in log] == list(range(len(log)))
    assert through_json(log) == log
    assert replay(through_json(log), seed=history.core.seed) == []


def test_histories_have_close_and_clear_decisions_by_every_reason_but_one() -> None:
    """Or the test above would say little."""
    log = [entry for seed in range(8) for entry in recorded(seed, 300)[0]]
    assert {entry.reason for entry in log} >= {"cached-prefix", "spill", "least-loaded", "syncing", "not-tokenized"}
    assert {name for entry in log for one in entry.candidates for name in one.terms_ms} == {
        "prefill", "queue", "decode", "slot", "swap", "memory", "others",
    }  # fmt: skip
    assert Counter(len(entry.candidates) for entry in log).keys() == {1, 2, 3, 4}
    undrawn = [entry for entry in log if len({decided(entry, seed) for seed in range(16)}) == 1]
    assert len(log) / 10 < len(undrawn) < len(log)


def recorded(seed: int, num_steps: int) -> tuple[list[LoggedDecision], int]:
    history = History(seed)
    history.go_on(num_steps)
    return history.core.decisions(), history.core.seed


def decided(entry: LoggedDecision, seed: int) -> int:
    totals = [sum(one.terms_ms.values()) for one in entry.candidates]
    running, out = ([getattr(one, name) for one in entry.candidates] for name in ("running", "left_out"))
    cached = [UNKNOWN if (n := one.predicted_cached_tokens) is None else n for one in entry.candidates]
    return chosen(totals, running, out, cached=cached, seed=seed, number=entry.number)


def test_another_choice_in_the_log_is_found_by_its_number() -> None:
    log, seed = recorded(3, 400)
    wrong = [n for n, entry in enumerate(log) if len(entry.candidates) > 1][::7]
    assert len(wrong) > 5
    for n in wrong:
        other = (log[n].chosen + 1) % len(log[n].candidates)
        log[n] = msgspec.structs.replace(log[n], chosen=other)
    assert replay(log, seed=seed) == wrong
    assert replay(log[wrong[0] + 1 :], seed=seed) == wrong[1:]


def test_other_costs_or_more_requests_in_the_log_are_found() -> None:
    log, seed = recorded(5, 300)
    for n, entry in enumerate(log):
        if len(entry.candidates) == 1:
            continue
        own = entry.candidates[entry.chosen]
        dear = msgspec.structs.replace(own, terms_ms=own.terms_ms | {"queue": 1e6})
        assert replay([with_candidate(entry, dear)], seed=seed) == [n]
        rivals = [i for i in range(len(entry.candidates)) if i != entry.chosen]
        equal = msgspec.structs.replace(
            entry,
            candidates=[
                msgspec.structs.replace(own, running=own.running - (i in rivals)) for i in range(len(entry.candidates))
            ],
        )
        assert replay([equal], seed=seed) == [n]


def with_candidate(entry: LoggedDecision, candidate: object) -> LoggedDecision:
    candidates = list(entry.candidates)
    candidates[entry.chosen] = candidate  # type: ignore[call-overload]
    return msgspec.structs.replace(entry, candidates=candidates)


def test_a_log_is_that_of_its_seed() -> None:
    log, seed = recorded(4, 300)
    others = replay(log, seed=seed + 1)
    assert 0 < len(others) < len(log)


def test_costs_are_told_to_the_last_bit() -> None:
    """Where a rounding decides, too: the sum that Python has had since 3.12 rounds otherwise."""
    history = History(0, CostWeights())
    history.go_on(400)
    for made in history.core._recent:
        assert [one.cost_ms for one in made.logged().candidates] == made.found.costs.total.tolist()


def test_an_empty_log_has_no_others() -> None:
    assert replay([], seed=1) == []
