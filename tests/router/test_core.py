"""RouterCore: what each worker is expected to have cached, who is chosen and why, and what a new life forgets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import RouterCore
from router.cost import NEAR_TIE_MS, CostWeights
from router.cursor import SeqPayload
from router.decision import Decision, Reason, RouteRequest
from router.effects import RequestReplay, RequestSnapshot, Subscribe, Unsubscribe
from router.errors import NoCapacity
from router.events import Tier
from router.hashing import Namespace, block_hashes, pack_tokens
from router.ids import DpRank, Incarnation, LoraId, SourceId, WorkerId
from router.ingest import SourceState
from router.reports import AdapterState, Holding, RankReport, TableView, WorkerReport, WorkerState
from router.table import as_keys

PAGE = 4
PROMPT = list(range(1, 18))
"""Four pages and the token that is always computed."""
A1, A2, B1 = LoraId("a1" * 16), LoraId("a2" * 16), LoraId("b1" * 16)


def source(worker: str, incarnation: str = "i1", rank: int = 0) -> SourceId:
    return SourceId(WorkerId(worker), Incarnation(incarnation), DpRank(rank))


def report(worker: str, incarnation: str = "i1", *, ranks: tuple[int, ...] = (0,), **fields: Any) -> WorkerReport:
    last_seq = fields.pop("last_seq", None)
    return WorkerReport(
        worker_id=WorkerId(worker),
        incarnation=Incarnation(incarnation),
        url=f"http://{worker}",
        ranks=tuple(
            RankReport(dp_rank=DpRank(r), endpoint=f"tcp://{worker}:{r}", replay_endpoint=None, last_seq=last_seq)
            for r in ranks
        ),
        **{"state": WorkerState.READY, "page_size": PAGE, **fields},
    )


def holding(worker: str, name: str, lora_id: LoraId, state: AdapterState = AdapterState.LOADED, **ids: str) -> Holding:
    return Holding(
        worker_id=WorkerId(worker),
        incarnation=Incarnation(ids.get("incarnation", "i1")),
        lora_id=lora_id,
        name=name,
        content_id=lora_id,
        state=state,
    )


def request(tokens: list[int] | None = None, **fields: Any) -> RouteRequest:
    return RouteRequest(packed_tokens=pack_tokens(PROMPT if tokens is None else tokens), **fields)


def hashes(
    tokens: list[int] | None = None,
    lora_id: LoraId | None = None,
    extra_key: str | None = None,
    salt: str | None = None,
) -> list[int]:
    namespace = Namespace.of(extra_key=extra_key, lora_id=lora_id, cache_salt=salt)
    return block_hashes(PROMPT if tokens is None else tokens, PAGE, namespace)


class Fleet:
    """A core whose workers' engines have been caught up with, and what they publish."""

    def __init__(self, seed: int = 7) -> None:
        self.core = RouterCore(CostWeights(), rng=random.Random(seed))
        self._seqs: Counter[SourceId] = Counter()
        self._versions = 0

    def start(self, *reports: WorkerReport) -> None:
        for one in reports:
            self.core.report(one)
            for rank in one.ranks:
                assert (
                    self.core.ingest.replayed(source(one.worker_id, one.incarnation, rank.dp_rank), [], now_s=0) == []
                )

    def load(self, *holdings: Holding) -> None:
        self._versions += 1
        assert self.core.update_table(TableView(epoch="e1", version=self._versions, holdings=holdings))

    def publish(self, of: SourceId, *events: dict[str, Any], dp_rank: int | None = None) -> None:
        seq, self._seqs[of] = self._seqs[of], self._seqs[of] + 1
        rank = of.dp_rank if dp_rank is None else dp_rank
        payload = msgspec.msgpack.encode([1.0, events, rank])
        assert self.core.ingest.live(of, SeqPayload(seq, payload), now_s=1.0) == []

    def store(self, of: SourceId, stored: list[int], **fields: Any) -> None:
        self.publish(of, {"type": "BlockStored", "block_hashes": stored, "medium": "GPU", **fields})

    def predicted(self, asked: RouteRequest | None = None) -> dict[str, int | None]:
        """Predicted tokens by worker, or by worker/rank past rank 0."""
        candidates = self.core.explain(asked or request())
        names = [c.source.worker_id + f"/r{c.source.dp_rank}" * (c.source.dp_rank > 0) for c in candidates]
        return dict(sorted(zip(names, [c.predicted_cached_tokens for c in candidates], strict=True)))

    def choose(self, asked: RouteRequest | None = None) -> tuple[str, Reason]:
        decision = self.core.route(asked or request())
        return decision.source.worker_id, decision.reason

    def dispatch(self, asked: RouteRequest) -> Decision:
        decision = self.core.route(asked)
        self.core.book(decision, now_s=0.0)
        return decision


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.core.check()


# -- workers come and go -----------------------------------------------------------------------------------------


def test_first_report_subscribes_to_every_rank(fleet: Fleet) -> None:
    subscriptions = [Subscribe(source("w0", rank=rank), f"tcp://w0:{rank}", None) for rank in (2, 3)]
    assert fleet.core.report(report("w0", ranks=(2, 3))) == subscriptions
    assert fleet.core.report(report("w0", ranks=(2, 3))) == []


def test_worker_without_ranks_yet_is_subscribed_to_when_it_has_them(fleet: Fleet) -> None:
    assert fleet.core.report(report("w0", state=WorkerState.STARTING, ranks=())) == []
    assert fleet.core.report(report("w0")) == [Subscribe(source("w0"), "tcp://w0:0", None)]
    assert fleet.choose() == ("w0", Reason.SYNCING)


def test_new_incarnation_forgets_blocks_bookings_and_adapters_of_the_old(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    fleet.load(holding("w0", "a", A1))
    fleet.store(source("w0"), hashes())
    old = fleet.core.book(fleet.core.route(request()), now_s=0.0)

    effects = fleet.core.report(report("w0", "i2"))
    assert effects == [Unsubscribe(source("w0")), Subscribe(source("w0", "i2"), "tcp://w0:0", None)]
    assert (fleet.predicted(), fleet.core.load.running.tolist()) == ({"w0": None}, [0])
    fleet.core.ingest.replayed(source("w0", "i2"), [], now_s=0.0)
    old.first_token(now_s=1.0)
    old.finish()
    assert (fleet.predicted(), fleet.core.load.running.tolist()) == ({"w0": 0}, [0])
    with pytest.raises(NoCapacity):
        fleet.core.route(request(adapter="a"))


def test_late_events_of_an_old_life_or_a_removed_worker_bring_nothing_back(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.start(report("w0", "i2"))
    fleet.store(source("w0"), hashes())
    assert fleet.core.forget(WorkerId("w1")) == [Unsubscribe(source("w1"))]
    fleet.store(source("w1"), hashes())
    late = source("w1")
    ingest = fleet.core.ingest
    assert [ingest.replayed(late, [], now_s=0), ingest.replay_failed(late), ingest.announced(late, 3)] == [[], [], []]
    assert ingest.snapshot(late, 0, {Tier.GPU: as_keys(hashes())}, now_s=0) == ingest.retry(late) == []
    assert (fleet.predicted(), late in ingest) == ({"w0": 0}, False)


def test_forgetting_an_unknown_worker_is_nothing(fleet: Fleet) -> None:
    assert fleet.core.forget(WorkerId("w9")) == []


@pytest.mark.parametrize("state", [s for s in WorkerState if s is not WorkerState.READY])
def test_worker_that_is_not_ready_is_not_chosen_and_keeps_its_blocks(fleet: Fleet, state: WorkerState) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.store(source("w0"), hashes())
    fleet.core.report(report("w0", state=state))
    assert fleet.choose() == ("w1", Reason.LEAST_LOADED)
    fleet.core.report(report("w0"))
    assert fleet.choose() == ("w0", Reason.CACHED_PREFIX)


def test_lost_last_batch_is_found_by_two_heartbeats(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    fleet.store(source("w0"), hashes()[:2])
    assert fleet.core.report(report("w0", last_seq=1)) == []
    assert fleet.core.report(report("w0", last_seq=1)) == [RequestReplay(source("w0"), 1)]
    assert fleet.choose() == ("w0", Reason.SYNCING)


# -- syncing -----------------------------------------------------------------------------------------------------


def test_syncing_source_is_routed_by_load_and_says_so(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    fleet.core.report(report("w1"))
    fleet.store(source("w0"), hashes([9] * 16))
    assert fleet.predicted() == {"w0": 0, "w1": None}
    fleet.dispatch(request(exclude={"w1"}))
    decision = fleet.core.route(request())
    assert (decision.source, decision.reason, decision.predicted_cached_tokens) == (source("w1"), Reason.SYNCING, None)
    assert decision.uncached_tokens == len(PROMPT)


def test_gap_makes_a_source_syncing_until_it_is_filled(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    first, second = ([1.0, [{"type": "BlockStored", "block_hashes": h}], 0] for h in (hashes()[:2], hashes()[2:]))
    ingest, w0 = fleet.core.ingest, source("w0")
    assert ingest.live(w0, SeqPayload(1, msgspec.msgpack.encode(second)), now_s=1) == [RequestReplay(w0, 0)]
    assert (ingest.state(w0), fleet.predicted()) == (SourceState.SYNCING, {"w0": None})
    assert ingest.replayed(w0, [SeqPayload(0, msgspec.msgpack.encode(first))], now_s=1) == []
    assert (ingest.state(w0), fleet.predicted()) == (SourceState.EXACT, {"w0": 16})
    assert (ingest.stats(w0).batches, ingest.stats(w0).repeats) == (2, 0)


def test_snapshot_replaces_what_was_known(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    fleet.store(source("w0"), hashes())
    assert fleet.core.ingest.replay_failed(source("w0")) == [RequestSnapshot(source("w0"))]
    blocks = {Tier.GPU: as_keys(hashes()[:1]), Tier.CPU: as_keys(hashes()[1:2])}
    assert fleet.core.ingest.snapshot(source("w0"), 5, blocks, now_s=1.0) == []
    assert (fleet.predicted(), fleet.core.ingest.cursor(source("w0")).next_seq) == ({"w0": 8}, 6)


def test_unreadable_batch_asks_for_a_snapshot(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    assert fleet.core.ingest.live(source("w0"), SeqPayload(0, b"\xc0"), now_s=1.0) == [RequestSnapshot(source("w0"))]
    assert (fleet.predicted(), fleet.core.ingest.stats(source("w0")).bad) == ({"w0": None}, 1)


def test_batches_tagged_with_another_rank_condemn_the_source(fleet: Fleet) -> None:
    fleet.start(report("w0", ranks=(1,)))
    fleet.publish(source("w0", rank=1), dp_rank=0)
    assert fleet.core.ingest.state(source("w0", rank=1)) is SourceState.UNVERIFIED
    assert fleet.core.ingest.fault(source("w0", rank=1)) == "batches are tagged dp_rank 0, expected 1"
    assert fleet.choose() == ("w0", Reason.UNVERIFIED)


# -- identity ----------------------------------------------------------------------------------------------------


def test_blocks_of_an_adapter_count_for_that_adapter_only(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    fleet.load(holding("w0", "a", A1), holding("w0", "b", B1))
    fleet.store(source("w0"), hashes(lora_id=A1), lora_name="a")
    assert [fleet.predicted(request(adapter=name)) for name in (None, "b", "a")] == [{"w0": 0}, {"w0": 0}, {"w0": 16}]


def test_unnamed_store_of_an_adapter_is_not_credited_to_the_base_model(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    fleet.load(holding("w0", "a", A1))
    fleet.store(source("w0"), hashes(lora_id=A1))
    assert [fleet.predicted(request(adapter=name)) for name in (None, "a")] == [{"w0": 0}, {"w0": 16}]


def test_same_adapter_on_two_workers_matches_on_both(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.load(holding("w0", "a", A1), holding("w1", "a", A1))
    for worker in ("w0", "w1"):
        fleet.store(source(worker), hashes(lora_id=A1))
    assert fleet.predicted(request(adapter="a")) == {"w0": 16, "w1": 16}


def test_adapter_is_followed_by_each_workers_own_lora_id(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.load(holding("w0", "a", A1), holding("w1", "a", A2))
    fleet.store(source("w0"), hashes(lora_id=A1))
    fleet.store(source("w1"), hashes(lora_id=A2)[:2])
    assert fleet.predicted(request(adapter="a")) == {"w0": 16, "w1": 8}


def test_reload_with_other_weights_is_cold_and_the_same_files_are_warm_again(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    fleet.load(holding("w0", "a", A1))
    fleet.store(source("w0"), hashes(lora_id=A1))
    fleet.load(holding("w0", "a", A2))
    assert fleet.predicted(request(adapter="a")) == {"w0": 0}
    longer = [*PROMPT[:16], 1, 2, 3, 4, 5]
    fleet.store(source("w0"), hashes(longer, lora_id=A1)[4:])
    assert fleet.predicted(request(longer, adapter="a")) == {"w0": 0}
    fleet.load(holding("w0", "a", A1))
    assert fleet.predicted(request(longer, adapter="a")) == {"w0": 20}
    fleet.publish(source("w0"), {"type": "BlockRemoved", "block_hashes": hashes(longer, lora_id=A1)[3:]})
    assert fleet.predicted(request(longer, adapter="a")) == {"w0": 12}


@pytest.mark.parametrize(
    ("warm", "other"),
    [
        ({"cache_salt": "A"}, {"cache_salt": "B"}),
        ({"cache_salt": "A"}, {}),
        ({"extra_key": "X"}, {"cache_salt": "X"}),
        ({"extra_key": "a", "cache_salt": "bc"}, {"extra_key": "ab", "cache_salt": "c"}),
    ],
)
def test_salts_and_extra_keys_are_kept_apart(fleet: Fleet, warm: dict[str, str], other: dict[str, str]) -> None:
    fleet.start(report("w0"))
    fleet.store(source("w0"), hashes(extra_key=warm.get("extra_key"), salt=warm.get("cache_salt")))
    assert [fleet.predicted(request(**fields)) for fields in (warm, other)] == [{"w0": 16}, {"w0": 0}]


@pytest.mark.parametrize("empty", ["cache_salt", "extra_key"])
def test_an_empty_key_is_no_key(fleet: Fleet, empty: str) -> None:
    fleet.start(report("w0"))
    fleet.store(source("w0"), hashes())
    assert fleet.predicted(request(**{empty: ""})) == {"w0": 16}


def test_default_format_promises_nothing_once_blocks_may_be_of_an_adapter_or_a_key(fleet: Fleet) -> None:
    fleet.start(report("w0", dynamo_format=False))
    fleet.store(source("w0"), hashes())
    assert fleet.predicted() == {"w0": 16}
    assert fleet.predicted(request(extra_key="k")) == {"w0": None}
    assert fleet.predicted() == {"w0": None}


def test_default_format_promises_nothing_beside_adapters(fleet: Fleet) -> None:
    fleet.start(report("w0", dynamo_format=False))
    fleet.load(holding("w0", "a", A1))
    fleet.store(source("w0"), hashes())
    assert [fleet.predicted(), fleet.predicted(request(adapter="a"))] == [{"w0": None}, {"w0": None}]
    fleet.load()
    assert fleet.predicted() == {"w0": None}


# -- how much is predicted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "cached"), [(17, 16), (16, 12), (13, 12), (5, 4), (4, 0), (1, 0), (0, 0)])
def test_last_token_is_always_computed(fleet: Fleet, num_tokens: int, cached: int) -> None:
    fleet.start(report("w0"))
    fleet.store(source("w0"), hashes())
    assert fleet.predicted(request(PROMPT[:num_tokens])) == {"w0": cached}


@pytest.mark.parametrize(("limit", "cached"), [(0, 0), (7, 4), (8, 8), (100, 16), (-1, 0)])
def test_request_may_limit_what_is_reused(fleet: Fleet, limit: int, cached: int) -> None:
    fleet.start(report("w0"))
    fleet.store(source("w0"), hashes())
    assert fleet.predicted(request(max_cached_tokens=limit)) == {"w0": cached}


def test_workers_of_different_page_sizes_are_each_asked_in_their_own(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1", page_size=8))
    fleet.store(source("w0"), hashes())
    fleet.store(source("w1"), block_hashes(PROMPT, 8, Namespace()))
    assert fleet.predicted() == {"w0": 16, "w1": 16}


def test_ranks_of_one_worker_are_told_apart(fleet: Fleet) -> None:
    fleet.start(report("w0", ranks=(4, 5)), report("w1", ranks=(6,)))
    fleet.store(source("w0", rank=5), hashes())
    decision = fleet.core.route(request())
    assert (decision.source, decision.local_rank, decision.url) == (source("w0", rank=5), 1, "http://w0")
    alone = fleet.core.route(request(exclude={"w0"}))
    assert (alone.source, alone.local_rank) == (source("w1", rank=6), None)


def test_prompt_that_cannot_be_tokenized_is_routed_by_load(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.dispatch(request(exclude={"w1"}))
    decision = fleet.core.route(RouteRequest(packed_tokens=None))
    assert (decision.source, decision.reason) == (source("w1"), Reason.NOT_TOKENIZED)
    assert (decision.prompt_tokens, decision.predicted_cached_tokens, decision.uncached_tokens) == (None, None, 0)


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
        assert {row.source.worker_id: row.terms["slot"] for row in rows} == waits
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
    fleet.core = RouterCore(CostWeights(decode_ms_per_request=0.1), rng=random.Random(7))
    fleet.start(report("w0"), report("w1"))
    for _ in range(3):
        fleet.core.book(fleet.core.route(request(exclude={"w1"})), now_s=0.0).first_token(now_s=0.0)
    costs = [candidate.cost_ms for candidate in fleet.core.explain(request())]
    assert 0 < costs[1] - costs[0] < NEAR_TIE_MS
    assert {fleet.choose()[0] for _ in range(16)} == {"w1"}


def test_excluded_workers_are_not_tried_again(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.store(source("w0"), hashes())
    assert fleet.choose(request(exclude={"w0"})) == ("w1", Reason.LEAST_LOADED)


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
    """Worker n holds overlap[n] pages of PROMPT, and (worker, tokens, answered) are its bookings."""
    fleet = Fleet()
    fleet.start(*[report(f"w{n}", max_loras_per_batch=1) for n in range(4)])
    fleet.load(*[holding(f"w{n}", "a", A1) for n in range(4)], *[holding(f"w{n}", "b", B1) for n in range(4)])
    for n, pages in enumerate(overlap):
        fleet.store(source(f"w{n}"), hashes(lora_id=A1)[:pages])
    for worker, tokens, answered in loads:
        others = {f"w{n}" for n in range(4) if n != worker}
        asked = request([500 + tokens] * tokens, adapter="b", exclude=others)
        booking = fleet.core.book(fleet.core.route(asked), now_s=0.0)
        if answered:
            booking.first_token(now_s=0.0)
    return fleet


def costs_of(fleet: Fleet) -> dict[str, float]:
    return {c.source.worker_id: c.cost_ms for c in fleet.core.explain(request(adapter="a"))}


OVERLAP = st.lists(st.integers(0, 4), min_size=4, max_size=4)


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(OVERLAP, LOADS)
def test_terms_sum_to_the_cost_and_the_least_is_chosen(overlap: list[int], loads: list[tuple[int, int, bool]]) -> None:
    fleet = loaded_fleet(overlap, loads)
    candidates = fleet.core.explain(request(adapter="a"))
    for candidate in candidates:
        assert set(candidate.terms) == {"prefill", "queue", "decode", "slot"}
        assert min(candidate.terms.values()) >= 0
        assert sum(candidate.terms.values()) == pytest.approx(candidate.cost_ms, abs=0.003)
    costs = [candidate.cost_ms for candidate in candidates]
    assert costs == sorted(costs)
    decision = fleet.core.route(request(adapter="a"))
    assert decision.cost_ms <= costs[0] + NEAR_TIE_MS + 0.001
    assert decision.uncached_tokens == len(PROMPT) - (decision.predicted_cached_tokens or 0)
    fleet.core.check()


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(OVERLAP, LOADS, st.integers(0, 3))
def test_more_overlap_never_raises_a_cost(overlap: list[int], loads: list[tuple[int, int, bool]], n: int) -> None:
    more = [pages + (at == n and pages < 4) for at, pages in enumerate(overlap)]
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
    fleet.core.load.observe(fleet.core.ingest.column(source("w1")), tokens=1000, took_ms=50)
    assert fleet.choose(request([1] * 500)) == ("w1", Reason.LEAST_LOADED)
    assert np.argmax(fleet.core.load.tokens_per_ms) == fleet.core.ingest.column(source("w1"))


# -- silence, restarts, faults -----------------------------------------------------------------------------------


def test_a_silent_worker_is_asked_last_and_nothing_is_predicted_for_it(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.store(source("w0"), hashes())
    fleet.core.silence(WorkerId("w0"))
    assert fleet.choose() == ("w1", Reason.LEAST_LOADED)
    assert fleet.predicted() == {"w1": 0}
    fleet.core.report(report("w0"))
    assert fleet.predicted() == {"w0": 16, "w1": 0}


def test_where_all_are_silent_somebody_is_asked_all_the_same(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    fleet.store(source("w0"), hashes())
    fleet.core.silence(WorkerId("w0"))
    assert (fleet.choose(), fleet.predicted()) == (("w0", Reason.SYNCING), {"w0": None})


def test_restarts_are_counted_and_silence_of_a_stranger_is_nothing(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w0", "i2"), report("w0", "i3"))
    fleet.core.silence(WorkerId("w9"))
    assert fleet.core.restarts == {"w0": 2}


def test_a_fault_that_the_worker_found_itself_is_shown(fleet: Fleet) -> None:
    fleet.start(report("w0", fault="its hash is 1, ours 2"), report("w1"))
    fleet.store(source("w0"), hashes())
    assert fleet.core.ingest.fault(source("w0")) == "its hash is 1, ours 2"
    assert fleet.predicted() == {"w0": None, "w1": 0}


def test_one_source_is_predicted_as_all_are(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.load(holding("w0", "a", A1))
    fleet.store(source("w0"), hashes(lora_id=A1))
    asked = request(adapter="a")
    assert fleet.core.predict(source("w0"), asked) == 16
    assert fleet.core.predict(source("w1"), asked) is None
    assert fleet.core.predict(source("w9"), asked) is None


def test_extra_keys_of_requests_explain_hashes_that_nothing_else_does(fleet: Fleet) -> None:
    fleet.start(report("w0"))
    fleet.core.route(request(extra_key="tenant"))
    tokens = [[base + i for i in range(4)] for base in (100, 200, 300, 400)]
    for page in tokens:
        fleet.store(
            source("w0"), hashes(page, extra_key="tenant"), token_ids=page, block_size=PAGE, parent_block_hash=None
        )
    assert fleet.core.ingest.state(source("w0")) is SourceState.EXACT
