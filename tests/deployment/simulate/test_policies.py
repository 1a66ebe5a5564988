"""The policies that ours is held against are as fair as those in the field."""

from __future__ import annotations

from collections import Counter

import pytest

from deployment.simulate.trace import Trace
from tests.deployment.simulate.traces import PAGE, call, play_out, settings


@pytest.mark.parametrize("num_workers", [2, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("first", [0, 80])
def test_conversations_are_hashed_evenly(num_workers: int, first: int) -> None:
    each = 200
    sessions = range(first, first + each * num_workers)
    trace = Trace([call(0.01 * i, [i], session=one, output=1) for i, one in enumerate(sessions)], PAGE)

    sim = play_out(trace, settings(num_workers=num_workers), "conversation_hash")

    counts = Counter(flight.worker for flight in sim.flights)
    assert {worker: n for worker in range(num_workers) if abs((n := counts[worker]) - each) > 0.35 * each} == {}


def test_conversations_of_others_stay_when_a_worker_dies() -> None:
    sessions = [call(0.02 * i, [i % 200], session=i % 200, output=1) for i in range(400)]  # each before and after
    trace = Trace(sessions, PAGE)

    sim = play_out(trace, settings(num_workers=5, fail_every_s=4.0, fail_for_s=100.0), "conversation_hash")

    moved = {
        before.worker
        for before, after in zip(sim.flights[:200], sim.flights[200:], strict=True)
        if before.worker != after.worker
    }
    assert moved == {0}


@pytest.mark.parametrize("gap_s", [0.5, 0.02])
def test_full_histories_leave_nobody_out(gap_s: float) -> None:
    trace = Trace([call(gap_s * i, range(1000 * i, 1000 * i + 20), session=i) for i in range(800)], PAGE)

    sim = play_out(trace, settings(kv_tokens=20_000), "prefix_approximate")  # a history holds 15 prompts

    counts = Counter(flight.worker for flight in sim.flights)
    assert max(counts.values()) < 1.5 * 200
    assert min(counts[worker] for worker in range(4)) > 0.5 * 200
