"""Claims of deployment/simulate/workload.py."""

from __future__ import annotations

import csv
import gzip
import math
import random
import statistics
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deployment.simulate.trace import Trace, TraceError
from deployment.simulate.workload import Traffic, play
from tests.deployment.simulate.traces import PAGE, call, chats

CHATS = chats(600, gap_s=0.5, adapters=0)
NUM_DRAWS = 8_000
SINGLES = Trace([call(float(i), [i], session=i) for i in range(NUM_DRAWS)], PAGE)
"""A conversation a second, of one call each: a draw each."""


def _gaps(trace: Trace) -> list[float]:
    return [after.at_s - before.at_s for before, after in pairwise(trace.calls)]


def _without_times(trace: Trace) -> list[Any]:
    return [replace(one, at_s=0.0, adapter=None) for one in trace.calls]


def _assert_drawn(drawn: list[str | None], shares: list[float]) -> None:
    """Within five standard deviations of what the shares give; a right law fails once in a million times."""
    counts = Counter(drawn)
    total = sum(shares)
    assert set(counts) <= {f"adapter-{i:03d}" for i in range(len(shares))}
    for i, share in enumerate(shares):
        p = share / total
        slack = 5 * math.sqrt(len(drawn) * p * (1 - p)) + 1
        assert abs(counts[f"adapter-{i:03d}"] - len(drawn) * p) <= slack, (i, counts, p)


# -- time --------------------------------------------------------------------------------------------------------


def test_by_default_a_trace_is_played_as_it_is_from_its_first_call_on() -> None:
    begin_s = CHATS.calls[0].at_s

    played = play(CHATS, Traffic(), seed=1)

    assert begin_s > 0
    assert [one.at_s for one in played.calls] == pytest.approx([one.at_s - begin_s for one in CHATS.calls])
    assert _without_times(played) == _without_times(CHATS)
    assert played.page_size == CHATS.page_size


@pytest.mark.parametrize("rate", [0.25, 1.0, 3.0, 100.0])
def test_a_rate_divides_all_gaps(rate: float) -> None:
    played = play(CHATS, Traffic(rate=rate), seed=1)

    assert _gaps(played) == pytest.approx([gap / rate for gap in _gaps(CHATS)], abs=1e-9)
    assert _without_times(played) == _without_times(CHATS)


def test_burstiness_raises_the_variance_of_gaps_and_keeps_their_mean() -> None:
    cvs = []
    for burstiness in (1.0, 1.5, 2.0, 4.0):
        gaps = _gaps(play(SINGLES, Traffic(burstiness=burstiness, rate=2.0), seed=3))
        assert min(gaps) >= 0
        mean = statistics.fmean(gaps)
        assert mean == pytest.approx(0.5, rel=0.15)
        cvs.append(statistics.pstdev(gaps) / mean)

    assert cvs[0] == pytest.approx(0.0, abs=1e-6)
    assert cvs == sorted(cvs)
    assert 0.8 < cvs[1] < cvs[2] - 0.3 < cvs[3] - 1.3


def test_burstiness_of_random_arrivals_is_at_least_what_it_says() -> None:
    rng = random.Random(8)
    at_s, calls = 0.0, []
    for i in range(NUM_DRAWS):
        at_s += rng.expovariate(1.0)
        calls.append(call(at_s, [i], session=i))

    gaps = _gaps(play(Trace(calls, PAGE), Traffic(burstiness=3.0), seed=3))

    assert statistics.pstdev(gaps) / statistics.fmean(gaps) > 3.0


def test_only_so_many_calls_are_played() -> None:
    played = play(CHATS, Traffic(max_calls=7), seed=1)

    assert played.calls == play(CHATS, Traffic(), seed=1).calls[:7]
    assert len(play(CHATS, Traffic(max_calls=10**6), seed=1).calls) == len(CHATS.calls)


# -- adapters ----------------------------------------------------------------------------------------------------


def test_without_adapters_a_trace_keeps_its_own() -> None:
    trace = chats(200, gap_s=1.0, adapters=2)

    assert [one.adapter for one in play(trace, Traffic(), seed=1).calls] == [one.adapter for one in trace.calls]
    drawn = play(trace, Traffic(adapters=4, popularity="uniform"), seed=1)
    assert {one.adapter for one in drawn.calls} == {f"adapter-{i:03d}" for i in range(4)}


@pytest.mark.parametrize("popularity", ["uniform", "zipf:0.9", "power:0.3", "drift"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_conversation_keeps_its_adapter_for_life(tmp_path: Path, popularity: str, seed: int) -> None:
    if popularity == "drift":  # another adapter each hour
        path = tmp_path / "rates.csv"
        _write_rates(path, {"m": {f"c{i}": {i: 1.0} for i in range(24)}})
        popularity = f"drift:{path}"

    played = play(CHATS, Traffic(adapters=24, popularity=popularity), seed=seed)

    adapters = defaultdict(set)
    for one in played.calls:
        adapters[one.session].add(one.adapter)
    assert len(CHATS.calls) > len(adapters) > 100
    assert {len(some) for some in adapters.values()} == {1}
    assert len(set.union(*adapters.values())) > 5


def test_uniform_draws_all_alike() -> None:
    played = play(SINGLES, Traffic(adapters=7, popularity="uniform"), seed=2)

    _assert_drawn([one.adapter for one in played.calls], [1.0] * 7)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.3, 2.1])
def test_zipf_draws_by_rank(exponent: float) -> None:
    played = play(SINGLES, Traffic(adapters=20, popularity=f"zipf:{exponent}"), seed=2)

    _assert_drawn([one.adapter for one in played.calls], [rank**-exponent for rank in range(1, 21)])


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.6, 1.0, 3.0])
def test_power_draws_as_s_lora_does(alpha: float) -> None:
    played = play(SINGLES, Traffic(adapters=20, popularity=f"power:{alpha}"), seed=2)

    shares = [((i + 1) / 20) ** alpha - (i / 20) ** alpha for i in range(20)]
    _assert_drawn([one.adapter for one in played.calls], shares)


def test_the_laws_are_told_apart() -> None:
    """The check above can fail."""
    drawn = [one.adapter for one in play(SINGLES, Traffic(adapters=20, popularity="zipf:0.7"), seed=2).calls]

    with pytest.raises(AssertionError):
        _assert_drawn(drawn, [rank**-0.8 for rank in range(1, 21)])


# -- popularity that drifts --------------------------------------------------------------------------------------


def _write_rates(path: Path, models: dict[str, dict[str, dict[int, float]]]) -> Path:
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "client", "hour", "rate_per_s", "iat_cv"])
        for model, clients in models.items():
            for client, rates in clients.items():
                writer.writerows([model, client, hour, rate, 1.0] for hour, rate in rates.items())
    return path


QUIET = dict.fromkeys(range(24), 0.1)
MODELS = {
    "many": {f"c{i}": dict.fromkeys(range(24), 1.0) | {24: float(100 * (9 - i))} for i in range(9)},
    "few": {
        # the second day is the busiest one, its twelve first hours unlike its twelve last
        "mornings": QUIET | {24 + hour: 8.0 for hour in range(12)},
        "evenings": QUIET | {36 + hour: 5.0 for hour in range(12)},
        "always": QUIET | {24 + hour: 2.0 for hour in range(24)},
    },
    "one": {"alone": QUIET},
}


@pytest.mark.parametrize("name", ["rates.csv", "rates.csv.gz"])
def test_drift_passes_through_the_hours_of_the_busiest_day(tmp_path: Path, name: str) -> None:
    path = _write_rates(tmp_path / name, MODELS)

    calls = play(SINGLES, Traffic(adapters=3, popularity=f"drift:{path}"), seed=2).calls

    half = NUM_DRAWS // 2
    # by all that they ask: mornings 96, evenings 60, always 48
    _assert_drawn([one.adapter for one in calls[: half - 5]], [8.0, 0.0, 2.0])
    _assert_drawn([one.adapter for one in calls[half + 5 :]], [0.0, 5.0, 2.0])


def test_each_hour_has_the_same_share_of_the_trace(tmp_path: Path) -> None:
    clients = {f"c{i:02d}": {i: 1.0} for i in range(24)}
    path = _write_rates(tmp_path / "rates.csv", {"m": clients})

    calls = play(SINGLES, Traffic(adapters=24, popularity=f"drift:{path}"), seed=2).calls

    counts = Counter(one.adapter for one in calls)
    assert len(counts) == 24
    assert all(count == pytest.approx(NUM_DRAWS / 24, abs=3) for count in counts.values())


def test_drift_takes_the_busiest_clients_of_the_model_that_has_enough(tmp_path: Path) -> None:
    path = _write_rates(tmp_path / "rates.csv", MODELS)

    calls = play(SINGLES, Traffic(adapters=4, popularity=f"drift:{path}"), seed=2).calls

    # "many" has nine clients, and its busiest day has one hour
    _assert_drawn([one.adapter for one in calls[: NUM_DRAWS // 24 - 5]], [900.0, 800.0, 700.0, 600.0])


def test_the_hour_is_that_of_the_trace_whatever_the_rate(tmp_path: Path) -> None:
    path = _write_rates(tmp_path / "rates.csv", MODELS)
    traffic = Traffic(adapters=3, popularity=f"drift:{path}")

    slow = play(SINGLES, traffic, seed=2)
    fast = play(SINGLES, Traffic(adapters=3, popularity=f"drift:{path}", rate=50.0), seed=2)

    assert [one.adapter for one in fast.calls] == [one.adapter for one in slow.calls]


# -- seeds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "traffic",
    [Traffic(burstiness=3.0), Traffic(adapters=9, popularity="zipf:1.0"), Traffic(adapters=9, popularity="power:0.5")],
    ids=["burstiness", "zipf", "power"],
)
def test_a_seed_tells_all(traffic: Traffic) -> None:
    played = play(CHATS, traffic, seed=5)

    assert play(CHATS, traffic, seed=5) == played
    assert play(CHATS, traffic, seed=6) != played


# -- what can't be played ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rate": 0.0}, "rate must be above 0"),
        ({"rate": -2.0}, "rate must be above 0"),
        ({"burstiness": 0.5}, "burstiness at least 1"),
        ({"adapters": -1}, "adapters at least 0"),
        ({"popularity": "zip:1"}, r"uniform, zipf:A.*, power:A.* or drift:FILE, got 'zip:1'"),
        ({"popularity": ""}, r"uniform, zipf:A.*, power:A.* or drift:FILE, got ''"),
        ({"popularity": "zipf:x"}, "'zipf:x'"),
        ({"popularity": "power:"}, "'power:'"),
    ],
)
def test_bad_values_are_refused_with_what_is_allowed(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        play(CHATS, Traffic(**{"adapters": 3, **change}), seed=1)


@pytest.mark.parametrize("text", ["", "client,hour\nc,1\n", "model,client,hour,rate_per_s\nm,c,one,2\n"])
def test_a_file_without_rates_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(text)

    with pytest.raises(ValueError, match=str(path)):
        play(CHATS, Traffic(adapters=3, popularity=f"drift:{path}"), seed=1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=str(tmp_path / "none.csv") + ".*model,client,hour,rate_per_s.*No such file"):
        play(CHATS, Traffic(adapters=3, popularity=f"drift:{tmp_path / 'none.csv'}"), seed=1)


def test_one_call_is_a_trace_too() -> None:
    trace = Trace([call(70.0, [1, 2])], PAGE)

    (one,) = play(trace, Traffic(adapters=1, burstiness=4.0, rate=0.5), seed=1).calls

    assert (one.at_s, one.adapter) == (0.0, "adapter-000")
