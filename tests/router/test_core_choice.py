"""RouterCore's choice: who may serve a request, who is chosen, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.choice import NEAR_TIE_MS, NEAR_TIE_SHARE
from router.decision import Reason, RouteRequest
from router.errors import NoCapacity
from router.reports import AdapterState, TableView, WorkerState
from tests.router.fleet import A1, A2, B1, LONG, PROMPT, Fleet, hashes, holding, report, request, source


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.core.check()


# -- adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [AdapterState.LOADING, AdapterState.FAILED])
def test_adapter_goes_only_to_workers_that_hold_it(fleet: Fleet, state: AdapterState) -> None:
    fleet.start(report("w0"), report("w1"), report("w2"))
    fleet.load(holding("w0", "a", A1), holding("w1", "a", A1, state), holding("w2", "a", A1, incarnation="i0"))
    for worker in ("w1", "w2"):
        fleet.store(source(worker), hashes(lora_id=A1))
    decision = fleet.core.route(request(adapter="a"))
    assert (decision.source, decision.lora_id, decision.adapter) == (source("w0"), A1, "a")
    assert fleet.predicted(request(adapter="a")) == {"w0": 0}


def test_older_table_of_one_epoch_changes_nothing_and_a_new_epoch_starts_over(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    views = [
        ("e1", 2, A1, True),
        ("e1", 2, A2, False),
        ("e1", 1, A2, False),
        ("e1", 3, B1, True),
        ("e2", 0, A2, True),
    ]
    for epoch, version, lora_id, taken in views:
        before = fleet.core.table
        view = TableView(epoch=epoch, version=version, holdings=(holding("w0", "a", lora_id),))
        assert fleet.core.update_table(view) is taken
        assert fleet.core.table is (view if taken else before)
        assert fleet.core.route(request(adapter="a")).lora_id == fleet.core.table.holdings[0].lora_id


def test_full_adapter_slots_cost_the_wait_for_one(fleet: Fleet) -> None:
    fleet.start(report("w0", max_loras_per_batch=1), report("w1", max_loras_per_batch=0))
    fleet.load(*[holding(w, name, i) for w in ("w0", "w1") for name, i in (("a", A1), ("b", B1))])
    fleet.dispatch(request(adapter="a", exclude={"w1"}))
    fleet.dispatch(request(adapter="a", exclude={"w0"}))
    for name, waits in (("a", {"w0": 0.0, "w1": 0.0}), ("b", {"w0": 200.0, "w1": 0.0})):
        rows = fleet.core.explain(request(adapter=name))
        assert {row.worker: row.terms_ms.get("slot", 0.0) for row in rows} == waits
    assert fleet.choose(request(adapter="b")) == ("w1", Reason.LEAST_LOADED)


# -- nobody can ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["route", "explain"])
def test_no_capacity_says_why(fleet: Fleet, call: str) -> None:
    def refused(asked: RouteRequest) -> str:
        with pytest.raises(NoCapacity) as error:
            getattr(fleet.core, call)(asked)
        return str(error.value)

    assert refused(request()) == "none of 0 workers is ready"
    fleet.core.report(report("w0", state=WorkerState.STARTING))
    assert refused(request()) == "none of 1 workers is ready"
    fleet.start(report("w0"), report("w1"))
    assert refused(request(exclude={"w0", "w1"})) == "2 workers failed this request and none is left"
    assert refused(request(adapter="a")) == "adapter 'a' is not loaded on any of 2 ready workers yet"


# -- choice ------------------------------------------------------------------------------------------------------


def test_idle_worker_beats_a_queue_whatever_it_holds(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.store(source("w0"), [1, 2])
    fleet.store(source("w1"), list(range(5000)))
    for _ in range(50):
        fleet.dispatch(request(exclude={"w1"}))
    assert fleet.choose(request([99] * 40)) == ("w1", Reason.LEAST_LOADED)


@pytest.mark.parametrize("num_workers", [1, 2, 4, 7])
@pytest.mark.parametrize("tokens", [[], PROMPT, [1] * 3000], ids=len)
def test_burst_before_any_answer_is_spread_evenly(fleet: Fleet, num_workers: int, tokens: list[int]) -> None:
    fleet.start(*[report(f"w{n}") for n in range(num_workers)])
    counts = Counter(fleet.dispatch(request(tokens)).source for _ in range(64))
    assert len(counts) == num_workers
    assert max(counts.values()) - min(counts.values()) <= 1


def test_hot_prefix_spills_when_its_queue_outgrows_computing_it_again(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    hot = list(range(4001))
    fleet.store(source("w0"), hashes(hot))
    reasons = [fleet.dispatch(request([*hot[:4000], 5000 + n, *[7] * 400])).reason for n in range(64)]
    first_spill = reasons.index(Reason.SPILL)
    assert reasons[:first_spill] == [Reason.CACHED_PREFIX] * first_spill
    assert first_spill >= 4000 // 401


def test_ties_are_broken_by_the_seed_alone() -> None:
    def choices(seed: int) -> list[str]:
        fleet = Fleet(seed)
        fleet.start(*[report(f"w{n}") for n in range(4)])
        return [fleet.choose()[0] for _ in range(32)]

    assert choices(1) == choices(1) != choices(2)
    assert set(choices(1)) == {"w0", "w1", "w2", "w3"}


def test_near_tie_goes_to_the_fewest_running(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    for other in ("w1", "w1", "w1", "w0"):
        fleet.core.book(fleet.core.route(request(exclude={other})), now_s=0.0).first_token(now_s=0.0)
    costs = [candidate.cost_ms for candidate in fleet.core.explain(request())]
    assert 0 < costs[1] - costs[0] < NEAR_TIE_MS
    assert {fleet.choose()[0] for _ in range(16)} == {"w1"}


@pytest.mark.parametrize(("cached_pages", "chosen"), [(5, "w1"), (250, "w0")], ids=["near", "far"])
def test_costs_within_a_share_of_the_least_are_a_tie(fleet: Fleet, cached_pages: int, chosen: str) -> None:
    fleet.start(report("w0"), report("w1"))
    tokens = list(range(4001))
    fleet.store(source("w0"), hashes(tokens)[:cached_pages])
    for other in ("w1", "w1", "w0"):
        fleet.core.book(fleet.core.route(request([], exclude={other})), now_s=0.0)
    first, second = fleet.core.explain(request(tokens))
    assert first.worker == "w0"
    assert second.cost_ms - first.cost_ms > NEAR_TIE_MS
    assert (second.cost_ms - first.cost_ms < first.cost_ms * NEAR_TIE_SHARE) is (chosen == "w1")
    assert {fleet.choose(request(tokens))[0] for _ in range(16)} == {chosen}


def test_excluded_workers_are_not_tried_again(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.store(source("w0"), hashes(LONG))
    assert fleet.choose(request(LONG)) == ("w0", Reason.CACHED_PREFIX)
    assert fleet.choose(request(LONG, exclude={"w0"})) == ("w1", Reason.LEAST_LOADED)


def test_explaining_and_choosing_change_nothing(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.store(source("w0"), hashes())
    first = fleet.core.explain(request())
    fleet.choose()
    assert fleet.core.explain(request()) == first
    assert not fleet.core.load.running.any()


# -- cost --------------------------------------------------------------------------------------------------------

LOADS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300), st.booleans()), max_size=12)


def loaded_fleet(overlap: list[int], loads: list[tuple[int, int, bool]]) -> Fleet:
    """Worker n holds overlap[n] quarters of LONG, and (worker, tokens, answered) are its bookings."""
    fleet = Fleet()
    fleet.start(*[report(f"w{n}", max_loras_per_batch=1) for n in range(4)])
    fleet.load(*[holding(f"w{n}", "a", A1) for n in range(4)], *[holding(f"w{n}", "b", B1) for n in range(4)])
    for n, quarters in enumerate(overlap):
        fleet.store(source(f"w{n}"), hashes(LONG, lora_id=A1)[: 25 * quarters])
    for worker, tokens, answered in loads:
        others = {f"w{n}" for n in range(4) if n != worker}
        asked = request([500 + tokens] * tokens, adapter="b", exclude=others)
        booking = fleet.core.book(fleet.core.route(asked), now_s=0.0)
        if answered:
            booking.first_token(now_s=0.0)
    return fleet


def costs_of(fleet: Fleet) -> dict[str, float]:
    return {c.worker: c.cost_ms for c in fleet.core.explain(request(LONG, adapter="a"))}


OVERLAP = st.lists(st.integers(0, 4), min_size=4, max_size=4)


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(OVERLAP, LOADS)
def test_terms_sum_to_the_cost_and_the_least_is_chosen(overlap: list[int], loads: list[tuple[int, int, bool]]) -> None:
    fleet = loaded_fleet(overlap, loads)
    candidates = fleet.core.explain(request(LONG, adapter="a"))
    for candidate in candidates:
        running = fleet.core.load.running[fleet.core.ingest.column(source(candidate.worker))]
        assert set(candidate.terms_ms) - {"queue"} == {"prefill", "swap", "others"} | (
            {"decode", "slot"} if running else set()
        )
        assert min(candidate.terms_ms.values()) > 0
        assert sum(candidate.terms_ms.values()) == pytest.approx(candidate.cost_ms)
    costs = [candidate.cost_ms for candidate in candidates]
    assert costs == sorted(costs)
    near_ms = costs[0] + max(NEAR_TIE_MS, costs[0] * NEAR_TIE_SHARE)
    decision = fleet.core.route(request(LONG, adapter="a"))
    assert decision.cost_ms <= near_ms + 0.001
    rivals = [fleet.core.ingest.column(source(c.worker)) for c in candidates if c.cost_ms <= near_ms - 0.001]
    assert all(fleet.core.load.running[decision.column] <= fleet.core.load.running[rival] for rival in rivals)
    assert decision.uncached_tokens == len(LONG) - (decision.predicted_cached_tokens or 0)
    fleet.core.check()


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(OVERLAP, LOADS, st.integers(0, 3))
def test_more_overlap_never_raises_a_cost(overlap: list[int], loads: list[tuple[int, int, bool]], n: int) -> None:
    more = [quarters + (at == n and quarters < 4) for at, quarters in enumerate(overlap)]
    before, after = costs_of(loaded_fleet(overlap, loads)), costs_of(loaded_fleet(more, loads))
    assert all(after[worker] <= cost for worker, cost in before.items())
    assert after[f"w{n}"] < before[f"w{n}"] or overlap[n] == 4


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(OVERLAP, LOADS, st.tuples(st.integers(0, 3), st.integers(0, 300), st.booleans()))
def test_more_load_never_lowers_a_cost(
    overlap: list[int], loads: list[tuple[int, int, bool]], extra: tuple[int, int, bool]
) -> None:
    before, after = costs_of(loaded_fleet(overlap, loads)), costs_of(loaded_fleet(overlap, [*loads, extra]))
    assert all(after[worker] >= cost for worker, cost in before.items())
    assert after[f"w{extra[0]}"] > before[f"w{extra[0]}"]


def test_faster_source_is_cheaper(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    columns = [fleet.core.ingest.column(source(worker)) for worker in ("w0", "w1")]
    speed = fleet.core.load.speed
    for _ in range(10):
        for column, took_ms in zip(columns, (200.0, 50.0), strict=True):
            speed.observe(column, tokens=1000, ahead_ms=0.0, took_ms=took_ms)
    assert [fleet.choose(request([1] * 500)) for _ in range(8)] == [("w1", Reason.LEAST_LOADED)] * 8
    assert speed.ms(columns[0], 500) > 2 * speed.ms(columns[1], 500)
