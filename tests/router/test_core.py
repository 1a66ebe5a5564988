"""RouterCore: what each worker is expected to have cached, what its engine is called, and what a new life forgets."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from router.cursor import SeqPayload
from router.decision import Reason, RouteRequest
from router.effects import RequestReplay, RequestSnapshot, Subscribe, Unsubscribe
from router.errors import NoCapacity
from router.events import Tier
from router.hashing import Namespace, block_hashes
from router.ids import WorkerId
from router.ingest import SourceState
from router.reports import AdapterState, Holding, TableView, WorkerState
from router.table import as_keys
from tests.router.fleet import A1, A2, B1, LONG, PAGE, PROMPT, Fleet, hashes, holding, report, request, source


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
    fleet.store(source("w0"), hashes(LONG))
    fleet.core.report(report("w0", state=state))
    assert fleet.choose(request(LONG)) == ("w1", Reason.LEAST_LOADED)
    fleet.core.report(report("w0"))
    assert fleet.choose(request(LONG)) == ("w0", Reason.CACHED_PREFIX)


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
    fleet.store(source("w0", rank=5), hashes(LONG))
    decision = fleet.core.route(request(LONG))
    assert (decision.source, decision.local_rank, decision.url) == (source("w0", rank=5), 1, "http://w0")
    alone = fleet.core.route(request(exclude={"w0"}))
    assert (alone.source, alone.local_rank) == (source("w1", rank=6), None)


def test_prompt_that_cannot_be_tokenized_is_routed_by_load(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.dispatch(request(exclude={"w1"}))
    decision = fleet.core.route(RouteRequest(packed_tokens=None))
    assert (decision.source, decision.reason) == (source("w1"), Reason.NOT_TOKENIZED)
    assert (decision.prompt_tokens, decision.predicted_cached_tokens, decision.uncached_tokens) == (None, None, 0)


# -- silence, restarts, faults -----------------------------------------------------------------------------------


def test_a_silent_worker_is_asked_last_and_nothing_is_predicted_for_it(fleet: Fleet) -> None:
    fleet.start(report("w0"), report("w1"))
    fleet.store(source("w0"), hashes(LONG))
    fleet.core.silence(WorkerId("w0"))
    assert fleet.choose(request(LONG)) == ("w1", Reason.LEAST_LOADED)
    assert fleet.predicted(request(LONG)) == {"w1": 0}
    fleet.core.report(report("w0"))
    assert fleet.predicted(request(LONG)) == {"w0": 400, "w1": 0}
    assert fleet.choose(request(LONG)) == ("w0", Reason.CACHED_PREFIX)


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


def test_time_to_load_an_adapter_is_learned_once_from_each_load(fleet: Fleet) -> None:
    def view(version: int, *rows: Holding) -> TableView:
        return TableView(epoch="e", version=version, holdings=rows)

    slow = msgspec.structs.replace(holding("w0", "a", A1), load_s=3.0)
    core = fleet.core
    before_ms = core.load.adapter_load_ms
    core.update_table(view(1000, slow))
    learned_ms = core.load.adapter_load_ms
    assert before_ms < learned_ms < 3000
    core.update_table(view(1001, slow))
    assert core.load.adapter_load_ms == learned_ms
    core.update_table(view(1002, slow, msgspec.structs.replace(holding("w1", "a", A1), load_s=3.0)))
    assert learned_ms < core.load.adapter_load_ms < 3000
    failed = msgspec.structs.replace(holding("w1", "b", B1), load_s=9.0, state=AdapterState.FAILED)
    learned_ms = core.load.adapter_load_ms
    core.update_table(view(1003, slow, failed))
    assert core.load.adapter_load_ms == learned_ms
