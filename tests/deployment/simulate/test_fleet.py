"""Claims of deployment/simulate/fleet.py, whatever the policy, and of what ours predicts in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from deployment.simulate.fleet import RETRY_S, FleetTooSmallError, Flight, Simulation
from deployment.simulate.report import figures, ideal_hit_rate
from deployment.simulate.trace import Trace
from tests.deployment.simulate.traces import (
    PAGE,
    POLICIES,
    PROFILE,
    Watched,
    call,
    chats,
    one_at_a_time,
    play_out,
    settings,
)

BUSY = chats(250, gap_s=0.04)
"""More than four workers serve at once."""
STORM: dict[str, Any] = {
    "kv_tokens": 6_000,
    "event_delay_s": 0.2,
    "event_loss": 0.3,
    "fail_every_s": 3.0,
    "fail_for_s": 4.0,
}
SLOW = chats(150, gap_s=1.0, max_output=300)
"""Later played one at a time."""
GAP_S = 8.0
"""Longer than any of its calls lasts, and than a lost batch is missed."""


def _watch(trace: Trace, policy: str, *, reload_s: float | None = None, **fleet: Any) -> tuple[Simulation, Watched]:
    sim = Simulation(trace, settings(**fleet), reload_s=reload_s)
    watched = Watched(POLICIES[policy](sim, 0))
    sim.run(watched)
    return sim, watched


# -- every call is served ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fleet", [{}, STORM], ids=["calm", "storm"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_call_is_served_once(policy: str, fleet: dict[str, Any]) -> None:
    sim, watched = _watch(BUSY, policy, **fleet)

    assert [flight.call for flight in sim.flights] == BUSY.calls
    assert (sum(flight.retries for flight in sim.flights) > 10) == bool(fleet)
    for flight in sim.flights:
        assert watched.ends[id(flight)] == [False] * flight.retries + [True]
        assert len(watched.attempts[id(flight)]) == flight.retries + 1
        assert 1 <= watched.firsts[id(flight)] <= flight.retries + 1
        assert flight.worker == watched.attempts[id(flight)][-1][1]
        assert flight.job is not None
        assert flight.job.emitted == flight.job.max_output == flight.call.num_output
        assert flight.job.done == flight.call.num_tokens
        assert flight.first_s is not None
        assert flight.ended_s is not None
        assert flight.call.at_s < flight.sent_s < flight.first_s <= flight.ended_s
    assert figures(sim)["requests"] == len(BUSY.calls)
    assert all(not worker.flights for worker in sim.workers)


@pytest.mark.parametrize("policy", POLICIES)
def test_engines_compute_what_was_not_cached(policy: str) -> None:
    sim = play_out(BUSY, settings(), policy)

    total = sum(flight.call.num_tokens for flight in sim.flights)
    computed = sum(worker.model.computed_tokens for worker in sim.workers)
    assert figures(sim)["computed_tokens"] == computed
    assert figures(sim)["token_hit_rate"] == round(1 - computed / total, 4)


# -- determinism -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_tells_all(policy: str) -> None:
    first, second = (play_out(BUSY, settings(**STORM, seed=3), policy, seed=5, reload_s=7.0) for _ in range(2))

    assert figures(first) == figures(second)
    assert [_fate(flight) for flight in first.flights] == [_fate(flight) for flight in second.flights]


@pytest.mark.parametrize("policy", ["random", "ours"])
def test_another_seed_is_another_run(policy: str) -> None:
    runs = [play_out(BUSY, settings(seed=seed), policy, seed=seed) for seed in (1, 2)]

    assert [_fate(flight) for flight in runs[0].flights] != [_fate(flight) for flight in runs[1].flights]


def test_another_process_comes_to_the_same() -> None:
    program = (
        "import json; from tests.deployment.simulate.test_fleet import *; "
        "print(json.dumps(figures(play_out(BUSY, settings(**STORM), reload_s=7.0))))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert json.loads(done.stdout) == figures(play_out(BUSY, settings(**STORM), reload_s=7.0))


def _fate(flight: Flight) -> tuple[Any, ...]:
    assert flight.job is not None
    return (flight.worker, flight.job.cached, flight.predicted, flight.first_s, flight.ended_s, flight.retries)


# -- hit rates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fleet", [{"kv_tokens": 0}, STORM], ids=["all fits", "storm"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_hit_rate_is_above_the_ideal(policy: str, fleet: dict[str, Any]) -> None:
    sim = play_out(BUSY, settings(**fleet), policy)

    assert 0.05 < figures(sim)["token_hit_rate"] <= ideal_hit_rate(sim)


def test_one_cache_that_holds_all_reaches_the_ideal() -> None:
    sim = play_out(one_at_a_time(SLOW, gap_s=GAP_S), settings(num_workers=1, kv_tokens=0))

    assert figures(sim)["token_hit_rate"] == ideal_hit_rate(sim) > 0.5


def test_the_ideal_counts_a_page_for_each_adapter() -> None:
    calls = [
        call(0.0, [1, 2], adapter="a", tail=32),
        call(1.0, [1, 2], adapter="b", tail=32),
        call(2.0, [1, 2, 3], adapter="a", tail=32),
        call(3.0, [1], tail=32),
    ]
    sim = Simulation(Trace(calls, PAGE), settings())

    assert ideal_hit_rate(sim) == round(2 * PAGE / (8 * PAGE + 4 * 32), 4)


# -- predictions -------------------------------------------------------------------------------------------------

DISTURBED: dict[str, dict[str, Any]] = {
    "nothing": {"kv_tokens": 0},
    "evictions": {"kv_tokens": 4_000},
    "few slots": {"num_slots": 1},
    "one worker": {"num_workers": 1},
    "reloads": {"reload_s": 150.0},
    "failures": {"fail_every_s": 17.0},
    "losses": {"event_loss": 0.5},
    "all at once": {"kv_tokens": 4_000, "reload_s": 150.0, "fail_every_s": 17.0, "event_loss": 0.5},
    "late events": {"event_delay_s": 1.0, "kv_tokens": 4_000},
}


@pytest.mark.parametrize("name", DISTURBED)
def test_what_we_predict_of_calls_that_come_one_at_a_time_is_so(name: str) -> None:
    fleet = dict(DISTURBED[name])
    reload_s = fleet.pop("reload_s", None)

    sim = play_out(one_at_a_time(SLOW, gap_s=GAP_S), settings(**fleet), reload_s=reload_s)

    assert all(_end_s(flight) + 1.0 < after.sent_s for flight, after in pairwise(sim.flights)), "some overlap"
    assert _wrong(sim) == []
    assert sum(flight.job.cached for flight in sim.flights if flight.job) > 5_000
    assert (figures(sim)["retries"] > 0) == ("fail_every_s" in fleet)
    if name not in ("nothing", "few slots", "losses"):
        assert figures(sim)["token_hit_rate"] < ideal_hit_rate(sim), "nothing was disturbed"


def test_what_we_predict_after_a_storm_of_failures_and_reloads_is_so() -> None:
    probes = one_at_a_time(Trace(BUSY.calls[-100:], PAGE), gap_s=GAP_S, begin_s=300.0)
    storm = {**STORM, "event_loss": 0.0, "fail_every_s": 2.9}

    sim = play_out(Trace(BUSY.calls + probes.calls, PAGE), settings(**storm), reload_s=331.0)

    assert figures(sim)["retries"] > 10
    assert figures(sim)["exact_predictions"] < 1.0
    assert [wrong for wrong in _wrong(sim) if wrong[0] >= len(BUSY.calls)] == []


def test_the_last_token_is_always_computed_and_we_know() -> None:
    """SGLang reuses full pages of all tokens but the last."""
    trace = Trace([call(5.0 * i, range(20), tail=tail) for i, tail in enumerate([0, 0, 1, 1])], PAGE)

    sim = play_out(trace, settings(num_workers=1))

    assert [(f.predicted, f.job.cached) for f in sim.flights if f.job] == [
        (0, 0),
        (19 * PAGE, 19 * PAGE),
        (20 * PAGE, 20 * PAGE),
        (20 * PAGE, 20 * PAGE),
    ]


def test_a_reload_leaves_nothing_cached_and_we_know() -> None:
    pages = list(range(20))
    calls = [call(5.0 * i, pages, adapter="a") for i in range(4)] + [call(5.0 * i + 2.5, pages) for i in range(4)]
    trace = Trace(sorted(calls, key=lambda one: one.at_s), PAGE)

    sim = play_out(trace, settings(num_workers=1), reload_s=7.0)  # before a's third and fourth

    by_adapter = {
        name: [(f.predicted, f.job.cached) for f in sim.flights if f.job and f.call.adapter == name]
        for name in ("a", None)
    }
    held = (20 * PAGE, 20 * PAGE)
    assert by_adapter == {"a": [(0, 0), held, (0, 0), (0, 0)], None: [(0, 0), held, held, held]}


@pytest.mark.parametrize("policy", ["ours", "name_keyed"])
def test_late_events_change_predictions_and_lose_nothing(policy: str) -> None:
    runs = {delay_s: play_out(BUSY, settings(event_delay_s=delay_s), policy) for delay_s in (0.0, 30.0)}

    assert [figures(sim)["requests"] for sim in runs.values()] == [len(BUSY.calls)] * 2
    predicted = [[flight.predicted for flight in sim.flights] for sim in runs.values()]
    assert predicted[0] != predicted[1]
    assert predicted[1] == [0] * len(BUSY.calls), "nothing has been heard by then"
    exact = [figures(sim)["exact_predictions"] for sim in runs.values()]
    assert exact[0] > 0.9 > 0.6 > exact[1]


def _wrong(sim: Simulation) -> list[tuple[int, int | None, int, int]]:
    return [
        (i, flight.predicted, flight.job.cached, flight.retries)
        for i, flight in enumerate(sim.flights)
        if flight.job is not None and flight.predicted != flight.job.cached
    ]


def _end_s(flight: Flight) -> float:
    assert flight.ended_s is not None
    return flight.ended_s


# -- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_dead_worker_had_goes_elsewhere(policy: str) -> None:
    sim, watched = _watch(BUSY, policy, fail_every_s=3.0, fail_for_s=5.0)

    deaths = {(at_s, worker) for at_s, worker, event in watched.lives if event == "died"}
    assert len(deaths) > 2
    retried = [flight for flight in sim.flights if flight.retries]
    assert len(retried) > 5
    for flight in retried:
        for (_, before), (at_s, after) in pairwise(watched.attempts[id(flight)]):
            assert after != before
            assert any(at_s == pytest.approx(died_s + RETRY_S) and who == before for died_s, who in deaths)


@pytest.mark.parametrize("policy", ["round_robin", "ours"])
def test_nothing_goes_to_the_dead(policy: str) -> None:
    _, watched = _watch(BUSY, policy, fail_every_s=3.0, fail_for_s=5.0)

    lives: dict[int, list[float]] = {worker: [] for worker in range(4)}
    for at_s, worker, event in watched.lives:
        assert event == ("returned" if len(lives[worker]) % 2 else "died")
        lives[worker].append(at_s)
    for worker, changes in lives.items():
        assert [after - before for before, after in pairwise(changes)][::2] == pytest.approx(
            [5.0] * (len(changes) // 2)
        )
        for at_s, _ in (one for tries in watched.attempts.values() for one in tries if one[1] == worker):
            assert sum(change_s <= at_s for change_s in changes) % 2 == 0, "sent to a dead worker"


def test_a_worker_returns_empty() -> None:
    trace = Trace([call(5.0 * i, range(20)) for i in range(9)], PAGE)

    sim = play_out(trace, settings(num_workers=2, fail_every_s=22.0, fail_for_s=10.0), "round_robin")

    held = 20 * PAGE
    # dead from 22 s to 32 s
    assert [(flight.worker, flight.job.cached) for flight in sim.flights if flight.job] == [
        (1, 0), (0, 0), (1, held), (0, held), (1, held), (1, held), (1, held), (0, 0), (1, held),
    ]  # fmt: skip


def test_the_last_worker_never_dies() -> None:
    alone, _ = _watch(BUSY, "ours", num_workers=1, fail_every_s=1.0)
    two, watched = _watch(BUSY, "ours", num_workers=2, fail_every_s=1.0, fail_for_s=1e6)

    assert figures(alone)["retries"] == 0
    assert [(worker, event) for _, worker, event in watched.lives] == [(0, "died")]
    assert figures(two)["requests"] == len(BUSY.calls)


def test_the_ideal_leaves_out_the_page_that_a_prompt_ends_with() -> None:
    sim = play_out(Trace([call(at_s, [1, 2], tail=0) for at_s in (0.0, 1.0)], PAGE), settings(num_workers=1))

    assert ideal_hit_rate(sim) == figures(sim)["token_hit_rate"] == 0.25


def test_a_fleet_that_is_far_too_small_says_so() -> None:
    two_days = msgspec.structs.replace(PROFILE, decode_base_ms=2 * 24 * 3600 * 1000.0)

    with pytest.raises(FleetTooSmallError, match=r"1 calls .* far too small"):
        play_out(Trace([call(0.0, [1], output=2)], PAGE), settings(profile=two_days))
