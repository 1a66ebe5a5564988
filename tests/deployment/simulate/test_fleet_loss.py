"""deployment/simulate/fleet.py: what is lost is fetched in its order, as the product does; limits of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deployment.simulate.fleet import Simulation
from deployment.simulate.report import figures
from deployment.simulate.trace import Trace
from tests.deployment.simulate.traces import PAGE, call, chats, one_at_a_time, play_out, settings


@pytest.mark.parametrize("policy", ["ours", "name_keyed"])
@pytest.mark.parametrize("seed", range(3))
def test_after_losses_a_quiet_fleet_is_known_as_it_is(policy: str, seed: int) -> None:
    """Two prompts, one cache that holds one: what one call stores the next removes, three times a second."""
    prompts = [range(20), range(100, 120)]
    rush = [call(0.3 * i, prompts[i % 2], output=2) for i in range(100)]
    probes = [call(100.0 + 5.0 * i, prompts[i % 2], output=2) for i in range(4)]
    fleet = settings(num_workers=1, kv_tokens=1400, event_loss=0.3, seed=seed)

    sim = play_out(Trace(rush + probes, PAGE), fleet, policy)

    assert figures(sim)["exact_predictions"] < 1.0, "nothing was lost at a bad time"
    assert [(f.predicted, f.job.cached) for f in sim.flights[-4:] if f.job] == [
        (f.job.cached, f.job.cached) for f in sim.flights[-4:] if f.job
    ]


def test_after_a_storm_with_losses_what_we_predict_is_so() -> None:
    busy = chats(300, gap_s=0.04)
    probes = one_at_a_time(Trace(busy.calls[-100:], PAGE), gap_s=8.0, begin_s=300.0)

    sim = play_out(Trace(busy.calls + probes.calls, PAGE), settings(kv_tokens=6000, event_loss=0.4, event_delay_s=0.2))

    assert [(f.predicted, f.job.cached) for f in sim.flights[-100:] if f.job and f.job.cached != f.predicted] == []


def test_a_trace_may_be_longer_than_a_day() -> None:
    days = Trace([call(36 * 3600.0 * i, [i]) for i in range(4)], PAGE)

    assert figures(play_out(days, settings()))["requests"] == 4


@pytest.mark.parametrize(
    "change",
    [
        {"num_workers": 0},
        {"fail_every_s": 0.0},
        {"fail_every_s": -1.0},
        {"event_delay_s": -0.1},
        {"event_loss": 1.5},
        {"event_loss": math.nan},
    ],
)
def test_a_fleet_that_makes_no_sense_is_refused_with_all_ranges(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"num_workers must be at least 1, .*event_loss from 0 to 1, .*; got"):
        settings(**change)


@pytest.mark.parametrize("reload_s", [0.0, -1.0, math.nan])
def test_reloads_take_time(reload_s: float) -> None:
    with pytest.raises(ValueError, match="reload_s must be above 0"):
        Simulation(Trace([call(0.0, [1], adapter="a")], PAGE), settings(), reload_s=reload_s)
