"""Cases that other routers got wrong, played through our policy: 30, 31, 32 and 38."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from actors.engine.emulated.profiles import PROFILES
from deployment.simulate.fleet import Flight, Simulation
from deployment.simulate.report import figures
from deployment.simulate.routed import Routed
from deployment.simulate.trace import Call, Trace
from router.decision import Decision, RouteRequest
from router.ids import WorkerId
from tests.deployment.simulate.traces import PAGE, call, play_out, settings

WHOLE: dict[str, Any] = {"profile": PROFILES["a100-llama-8b"], "kv_tokens": 0, "num_slots": 8}
"""Workers as they are, not small ones."""


class Steered(Routed):
    """Ours, but that calls of some sessions may go to one worker only."""

    def __init__(self, sim: Simulation, steer: dict[int, int]) -> None:
        super().__init__(sim, 0)
        self._steer = steer
        self._exclude: frozenset[WorkerId] = frozenset()
        self._route = self.core.route
        self.core.route = self._route_some  # type: ignore[method-assign]

    def choose(self, flight: Flight, now_s: float, alive: Sequence[int]) -> int:
        only = self._steer.get(flight.call.session)
        self._exclude = frozenset(WorkerId(f"w{i}") for i in alive if only not in (None, i))
        return super().choose(flight, now_s, alive)

    def _route_some(self, request: RouteRequest) -> Decision:
        return self._route(replace(request, exclude=self._exclude))


# -- case 30 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queued", [0, 1])
@pytest.mark.parametrize("tokens_each", [100, 4000])
def test_case_30_a_queue_weighs_more_than_a_large_index(queued: int, tokens_each: int) -> None:
    """A small index and 50 queued here, a large one and nothing queued there, a prompt that nobody has: there."""
    small, large, waiting, probe = range(4)
    idle = 1 - queued
    pages = count()
    calls = [call(float(i), _take(pages, 60), session=large, output=2) for i in range(100)]
    calls.append(call(110.0, _take(pages, 2), session=small, output=2))
    calls += [call(200.0, _take(pages, tokens_each // PAGE), session=waiting) for _ in range(50)]
    calls += [call(200.01, _take(pages, length), session=probe) for length in (1, 10, 100)]
    sim = Simulation(Trace(calls, PAGE), settings(num_workers=2, **WHOLE))
    policy = Steered(sim, {small: queued, waiting: queued, large: idle})

    sim.run(policy)

    by_session = {session: [f for f in sim.flights if f.call.session == session] for session in range(4)}
    probes, queue = by_session[probe], by_session[waiting]
    assert {f.worker for f in queue} == {queued}
    assert sum(f.first_s is not None and f.first_s > probes[0].sent_s for f in queue) == 50
    assert max(f.ended_s or 0.0 for f in by_session[large] + by_session[small]) < 200.0
    assert [f.worker for f in probes] == [idle] * 3


def _take(pages: count[int], num: int) -> list[int]:
    return [next(pages) for _ in range(num)]


# -- case 31 -----------------------------------------------------------------------------------------------------


def _distinct(i: int) -> Call:
    return call(1.0, range(100 * i, 100 * i + 20), session=i)


def _alike(i: int) -> Call:
    return call(1.0, range(20), session=i)


def _one_adapter(i: int) -> Call:
    return call(1.0, range(100 * i, 100 * i + 20), session=i, adapter="adapter-000")


def _shared_prefix(i: int) -> Call:
    return call(1.0, [*range(19), 100 + i], session=i)


@pytest.mark.parametrize("make", [_distinct, _alike, _one_adapter, _shared_prefix])
@pytest.mark.parametrize("seed", range(5))
def test_case_31_a_burst_is_spread_before_any_first_byte(make: Any, seed: int) -> None:
    trace = Trace([make(i) for i in range(64)], PAGE)

    sim = play_out(trace, settings(num_workers=8, **WHOLE), seed=seed)

    assert max(f.sent_s for f in sim.flights) < min(f.first_s or 0.0 for f in sim.flights)
    spread = Counter(flight.worker for flight in sim.flights)
    assert [spread[worker] for worker in range(8)] == [8] * 8


# -- case 32 -----------------------------------------------------------------------------------------------------

HOT = range(32)
NUM_BEFORE, NUM_RUSH = 5, 1500


def _hot_calls(num: int, *, gap_s: float, begin_s: float, own_pages: int, output: int, seed: int) -> list[Call]:
    """One conversation's calls, all with the same 2,048 tokens first."""
    rng = random.Random(seed)
    at_s, calls = begin_s, []
    for i in range(num):
        own = range(1000 + 100 * i, 1000 + 100 * i + own_pages)
        calls.append(call(at_s, [*HOT, *own], adapter="hot", output=output))
        at_s += rng.expovariate(1 / gap_s)
    return calls


def _run_hot(policy: str, own_pages: int, output: int, seed: int) -> Simulation:
    shape: dict[str, Any] = {"own_pages": own_pages, "output": output, "seed": seed}
    alone = play_out(Trace(_hot_calls(300, gap_s=1e-6, begin_s=0.0, **shape), PAGE), settings(num_workers=1, **WHOLE))
    capacity = figures(alone)["requests_per_s"]
    # one worker becomes the home of the prefix; then the rush comes
    calls = [call(5.0 * i, [*HOT, 100 + i], adapter="hot", output=1) for i in range(NUM_BEFORE)]
    calls += _hot_calls(NUM_RUSH, gap_s=1 / (8 * capacity), begin_s=100.0, **shape)
    return play_out(Trace(calls, PAGE), settings(num_workers=4, **WHOLE), policy, seed=seed)


@pytest.mark.parametrize(("own_pages", "output"), [(2, 1), (2, 60), (0, 16)], ids=["prefill", "decode", "all hot"])
def test_case_32_a_hot_prefix_gets_further_copies(own_pages: int, output: int) -> None:
    sim = _run_hot("ours", own_pages, output, seed=0)

    assert len({flight.worker for flight in sim.flights[:NUM_BEFORE]}) == 1, "it had no home"
    copies = [worker.cache.peek(sim.flights[0].prompt.hashes[: len(HOT)]) // PAGE for worker in sim.workers]
    assert copies == [len(HOT)] * 4
    assert figures(sim)["busiest_to_mean"] < 1.5


def test_case_32_fails_where_a_conversation_stays_at_home() -> None:
    assert figures(_run_hot("conversation_hash", 2, 1, seed=0))["busiest_to_mean"] == 4.0


# -- case 38 -----------------------------------------------------------------------------------------------------

BACK_S = 100.0
WITHIN_S = 60.0


def visits(
    *, per_s: float, system: int, first: int, turns: int, growth: int, output: int, adapters: int, seed: int
) -> Trace:
    """Conversations come all the time, a turn each 12 seconds; lengths are twice as much at most, and in pages."""
    rng, pages = random.Random(seed), count()
    systems = [_take(pages, system) for _ in range(max(1, adapters))]
    calls: list[Call] = []
    begin_s, end_s = -60.0, BACK_S + WITHIN_S
    for session in count():
        begin_s += rng.expovariate(per_s)
        if begin_s > end_s:
            break
        which = rng.randrange(len(systems))
        prompt = systems[which] + _take(pages, rng.randint(1, 2 * first))
        at_s = begin_s
        for _ in range(rng.randint(1, 2 * turns - 1)):
            made = call(at_s, prompt, session=session, tail=rng.randrange(1, PAGE), output=rng.randint(1, 2 * output))
            calls.append(replace(made, adapter=f"adapter-{which:03d}" if adapters else None))
            prompt = prompt + _take(pages, rng.randint(1, 2 * growth))
            at_s += rng.expovariate(1 / 12.0)
    kept = [one for one in sorted(calls, key=lambda one: one.at_s) if 0 <= one.at_s <= end_s]
    return Trace(kept, PAGE)


def share_of_the_returned(trace: Trace, policy: str, *, seed: int, num_workers: int = 4) -> float:
    """Calls of worker 0 in the minute after its return, by the mean of the others'."""
    # worker 0 dies at 80 s; the next would at 160 s, which is the end
    fleet = settings(num_workers=num_workers, fail_every_s=BACK_S - 20.0, fail_for_s=20.0, **WHOLE)
    sim = play_out(trace, fleet, policy, seed=seed)
    sent = Counter(f.worker for f in sim.flights if BACK_S <= f.sent_s < BACK_S + WITHIN_S)
    return sent[0] / (sum(sent[worker] for worker in range(1, num_workers)) / (num_workers - 1))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "traffic",
    [
        {"per_s": 2.0, "system": 0, "first": 10, "turns": 4, "growth": 6, "output": 60, "adapters": 0},
        {"per_s": 4.0, "system": 4, "first": 60, "turns": 1, "growth": 1, "output": 30, "adapters": 4},
        {"per_s": 2.0, "system": 0, "first": 10, "turns": 4, "growth": 6, "output": 60, "adapters": 6},
        {"per_s": 2.0, "system": 8, "first": 6, "turns": 4, "growth": 6, "output": 60, "adapters": 0},
        {"per_s": 2.0, "system": 8, "first": 6, "turns": 4, "growth": 6, "output": 60, "adapters": 6},
        {"per_s": 20.0, "system": 40, "first": 1, "turns": 1, "growth": 1, "output": 15, "adapters": 4},
    ],
    ids=["conversations", "documents", "adapters", "a system prompt", "its own for each adapter", "short questions"],
)
def test_case_38_a_worker_that_returns_empty_gets_its_share(traffic: dict[str, Any], seed: int) -> None:
    assert share_of_the_returned(visits(**traffic, seed=seed), "ours", seed=seed) >= 0.5
