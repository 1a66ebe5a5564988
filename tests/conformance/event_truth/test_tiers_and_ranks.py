"""Blocks in several tiers and on several ranks, after a clear, and when their worker has left (cases 9, 10, 18-20).

SGLang's trees know one tier; where events tell of others, a Counter of hashes by tier is the truth.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from router.cursor import SeqPayload
from router.decision import RouteRequest
from router.events import Tier
from router.hashing import Namespace, block_hashes, pack_tokens
from router.ingest import SourceState
from tests.conformance.event_truth.engine import PAGE, TruthEngine
from tests.conformance.event_truth.fleet import TruthFleet, TruthWorker, eventually

P = list(range(100, 124))
"""Six pages."""
Q = list(range(200, 216))
R = list(range(300, 316))
LONG = list(range(1000, 1400))
"""Enough to outweigh a near tie."""


def store_event(tokens: list[int], medium: str | None = "GPU", *, first: int = 0, last: int | None = None) -> Any:
    """Pages [first, last) of a base prompt."""
    hashes = block_hashes(tokens, PAGE, Namespace())
    return BlockStored(
        block_hashes=hashes[first:last],
        parent_block_hash=hashes[first - 1] if first else None,
        token_ids=tokens[first * PAGE : None if last is None else last * PAGE],
        block_size=PAGE,
        lora_id=None,
        medium=medium,
    )


def remove_event(tokens: list[int], medium: str | None = "GPU", *, first: int = 0, last: int | None = None) -> Any:
    return BlockRemoved(block_hashes=block_hashes(tokens, PAGE, Namespace())[first:last], medium=medium)


class Copies:
    """The naive model of one rank: how often each hash is there, by tier."""

    def __init__(self) -> None:
        self.held: dict[str, Counter[int]] = {tier.value: Counter() for tier in Tier}

    def apply(self, event: Any) -> None:
        match event:
            case AllBlocksCleared():
                for counter in self.held.values():
                    counter.clear()
            case BlockStored():
                self.held[event.medium or "GPU"].update(event.block_hashes)
            case BlockRemoved():
                for value in event.block_hashes:
                    if self.held[event.medium or "GPU"][value]:
                        self.held[event.medium or "GPU"][value] -= 1

    def cached(self, tokens: list[int]) -> int:
        num_pages = 0
        for value in block_hashes(tokens, PAGE, Namespace()):
            if not any(counter[value] for counter in self.held.values()):
                break
            num_pages += 1
        return num_pages * PAGE

    def hashes(self, tier: Tier) -> set[int]:
        return {value % (1 << 64) for value, count in self.held[tier].items() if count}


# -- clear -------------------------------------------------------------------------------------------------------


async def test_a_clear_takes_all_adapters_and_tiers_of_its_rank_and_nothing_else() -> None:
    ranks = [TruthEngine(dp_rank=0), TruthEngine(dp_rank=1)]
    other = TruthEngine(dp_rank=2)
    w0, w1 = TruthWorker("w0", ranks), TruthWorker("w1", [other])
    async with TruthFleet(w0, w1) as fleet:
        index, [source, neighbour] = fleet.core.ingest.index, w0.sources
        for engine in (*ranks, other):
            engine.store(P)
            engine.store(P, adapter="ad-a")
            engine.store(P, adapter="ad-b", salt="s", extra="x")
            engine.publish([store_event(P, tier) for tier in Tier])
        await fleet.settle()
        ranks[0].clear()
        await fleet.settle()
        for names in ({}, {"adapter": "ad-a"}, {"adapter": "ad-b", "salt": "s", "extra": "x"}):
            assert fleet.assert_true(P, **names) == [{"w0": 0, "w0/r1": 24, "w1": 24}]
        assert [index.num_blocks(source, tier) for tier in Tier] == [0, 0, 0, 0]
        assert [index.num_blocks(neighbour, tier) for tier in Tier] == [18, 6, 6, 6]
        ranks[0].publish([store_event(P), remove_event(P), store_event(P[:8], "DISK")])  # no copy is left to count
        await fleet.settle()
        assert fleet.predicted(P) == {"w0": 8, "w0/r1": 24, "w1": 24}


# -- copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("medium", [None, *(tier.value for tier in Tier)])
async def test_stored_twice_and_removed_once_is_held_and_removed_again_is_gone(medium: str | None) -> None:
    worker = TruthWorker("w0", [TruthEngine(dp_rank=0), TruthEngine(dp_rank=1)])
    first, second = worker.engines
    async with TruthFleet(worker) as fleet:
        stats = fleet.core.ingest.stats(worker.sources[0])
        seen = []
        first.publish([store_event(P, medium)])
        second.publish([store_event(P, medium), store_event(P, medium)])
        for event in (store_event(P, medium), *[remove_event(P, medium)] * 3, store_event(P, medium)):
            first.publish([event])
            await fleet.settle()
            seen.append((fleet.predicted(P)["w0"], stats.missing))
            assert fleet.predicted(P)["w0/r1"] == 24
        assert seen == [(24, 0), (24, 0), (0, 0), (0, 6), (24, 6)]
        for cached in (24, 0):
            second.publish([remove_event(P, medium)])
            await fleet.settle()
            assert fleet.predicted(P) == {"w0": 24, "w0/r1": cached}


async def test_a_router_that_starts_from_a_snapshot_knows_how_often_a_block_is_there() -> None:
    engine = TruthEngine(buffer_steps=1)
    worker = TruthWorker("w0", [engine])
    for medium in ("GPU", "GPU", "CPU_PINNED"):
        engine.publish([store_event(P, medium)])
        await worker.settled()
    async with TruthFleet(worker) as fleet:
        for medium, cached in (("GPU", 24), ("CPU_PINNED", 24), ("GPU", 0)):
            engine.publish([remove_event(P, medium)])
            await fleet.settle()
            assert fleet.predicted(P) == {"w0": cached}
        assert fleet.core.ingest.stats(worker.sources[0]).batches < engine.published


async def test_any_life_of_copies_in_tiers_and_ranks_equals_the_naive_model() -> None:
    rng = random.Random(5)
    worker = TruthWorker("w0", [TruthEngine(dp_rank=0), TruthEngine(dp_rank=1)])
    models = [Copies(), Copies()]
    prompts = [P, [*P[:12], *Q], Q]
    media = [None, *(tier.value for tier in Tier)]
    async with TruthFleet(worker) as fleet:
        index = fleet.core.ingest.index
        for step in range(120):
            rank = rng.randrange(2)
            events: list[Any] = []
            for _ in range(rng.randint(1, 4)):
                kind = rng.choices([store_event, remove_event, None], [10, 9, 1])[0]
                pages = sorted(rng.sample(range(5), 2))
                event = kind(rng.choice(prompts), rng.choice(media), first=pages[0], last=pages[1]) if kind else None
                events.append(event or AllBlocksCleared())
            if isinstance(events[0], BlockRemoved | BlockStored) and rng.random() < 0.3:
                events[0].block_hashes += events[0].block_hashes[:1]  # twice in one event
            for event in events:
                models[rank].apply(event)
            worker.engines[rank].publish(events)
            if step % 12 == 11:
                await fleet.settle()
                for tokens in prompts:
                    assert list(fleet.predicted(tokens).values()) == [model.cached(tokens) for model in models]
                for source, model in zip(worker.sources, models, strict=True):
                    held = {tier: set(index.hashes(source, tier).tolist()) for tier in Tier}
                    assert held == {tier: model.hashes(tier) for tier in Tier}
                fleet.core.check()


# -- tiers -------------------------------------------------------------------------------------------------------


async def test_a_block_matches_while_any_tier_has_it_and_a_prefix_may_lie_in_several() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        engine.store(P)
        engine.publish([store_event(P, "CPU_PINNED")])
        await fleet.settle()
        engine.evict(24)
        await fleet.settle()
        assert (fleet.truth(P), fleet.predicted(P)) == ({"w0": 0}, {"w0": 24})
        engine.publish([remove_event(P, "CPU_PINNED", first=2)])
        await fleet.settle()
        assert fleet.predicted(P) == {"w0": 8}
        engine.publish([store_event(P, "DISK", first=4), store_event(P, "EXTERNAL", first=2, last=4)])
        await fleet.settle()
        decision = fleet.core.route(RouteRequest(packed_tokens=pack_tokens([*P, 0])))
        assert (decision.predicted_cached_tokens, decision.uncached_tokens) == (24, 1)


async def test_disk_and_external_are_kept_apart() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        engine.publish([store_event(P, "DISK"), store_event(P, "EXTERNAL"), remove_event(P, "EXTERNAL", first=3)])
        await fleet.settle()
        held = [fleet.core.ingest.index.num_blocks(worker.sources[0], tier) for tier in Tier]
        assert (held, fleet.predicted(P)) == ([0, 0, 6, 3], {"w0": 24})
        engine.publish([remove_event(P, "DISK")])
        await fleet.settle()
        assert fleet.predicted(P) == {"w0": 12}
        assert fleet.core.ingest.stats(worker.sources[0]).missing == 0


async def test_a_medium_of_a_later_release_is_counted_and_changes_nothing() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        engine.store(P)
        engine.publish([store_event(Q, "CXL"), remove_event(P, "CXL"), remove_event(P, "CXL")])
        engine.publish([store_event(R), store_event(R, "CXL"), store_event([*R, *Q], first=4)])
        await fleet.settle()
        assert fleet.assert_true(P, Q) == [{"w0": 24}, {"w0": 0}]
        assert fleet.predicted([*R, *Q]) == {"w0": 32}
        assert fleet.core.ingest.stats(worker.sources[0]).bad == 4


# -- ranks, and workers that leave -------------------------------------------------------------------------------


async def test_stores_under_way_do_not_bring_back_a_worker_that_left_nor_fall_to_who_takes_its_place() -> None:
    engines = [TruthEngine(dp_rank=i) for i in range(3)]
    w0, w1, w2 = (TruthWorker(f"w{i}", [engine]) for i, engine in enumerate(engines))
    async with TruthFleet(w0, w1) as fleet:
        ingest, [source] = fleet.core.ingest, w0.sources
        engines[0].store(P)
        await fleet.settle()
        column = ingest.column(source)
        del fleet.workers[w0.worker_id]
        fleet.workers[w2.worker_id] = w2
        engines[0].store(Q)  # on its way, or in the socket
        w0.wires[0].wait_heard(engines[0].published - 1)
        fleet._follower.follow({w.worker_id: w.heartbeat_endpoint for w in (w1, w2)})
        engines[0].store(R)
        batch = SeqPayload(engines[0].published, msgspec.msgpack.encode([1.0, [store_event(R)], 0]))
        assert ingest.live(source, batch, now_s=1.0) == []
        assert ingest.replaying(source, [batch], now_s=1.0) == ingest.announced(source, 99) == []
        w0.wires[0].wait_heard(engines[0].published - 1)
        for engine in engines[1:]:
            engine.store(P[:8])
        await fleet.known()
        await fleet.settle()
        assert ingest.column(w2.sources[0]) == column
        assert fleet.assert_true(P, Q, R) == [{"w1": 8, "w2": 8}, *[{"w1": 0, "w2": 0}] * 2]
        assert (w0.worker_id in fleet.core.workers, source in ingest) == (False, False)
        fleet.workers[w0.worker_id] = w0
        fleet._follower.follow({w.worker_id: w.heartbeat_endpoint for w in (w0, w1, w2)})
        await fleet.known()
        await fleet.settle()
        assert [answer["w0"] for answer in fleet.assert_true(P, Q, R)] == [24, 16, 16]


async def test_batches_tagged_with_another_rank_condemn_their_source_and_no_other() -> None:
    worker = TruthWorker("w0", [TruthEngine(dp_rank=0), TruthEngine(dp_rank=1)])
    first, second = worker.engines
    async with TruthFleet(worker) as fleet:
        ingest, [source, other] = fleet.core.ingest, worker.sources
        first.store(P)
        second.store(P)
        await fleet.settle()
        first.publish([], dp_rank=7)
        await eventually(lambda: ingest.state(source) is SourceState.UNVERIFIED, what="it is condemned")
        assert ingest.fault(source) == "batches are tagged dp_rank 7, expected 0"
        first.store(Q)
        second.store(Q)
        await eventually(
            lambda: all(
                ingest.cursor(one).next_seq == engine.published
                for one, engine in zip(worker.sources, worker.engines, strict=True)
            ),
            what="both are heard",
        )
        assert (ingest.state(source), ingest.state(other)) == (SourceState.UNVERIFIED, SourceState.EXACT)
        assert (fleet.predicted(P), fleet.predicted(Q)) == ({"w0": None, "w0/r1": 24}, {"w0": None, "w0/r1": 16})


async def test_the_chosen_rank_is_the_one_with_the_prefix_by_the_number_its_engine_knows() -> None:
    worker = TruthWorker("w0", [TruthEngine(dp_rank=4), TruthEngine(dp_rank=5)])
    single = TruthWorker("w1", [TruthEngine(dp_rank=6)])
    async with TruthFleet(worker, single) as fleet:
        engines = [*worker.engines, *single.engines]
        prompts = [[start, *LONG] for start in range(3)]
        for i, engine in enumerate(engines):
            engine.store(prompts[i])
            engine.store(prompts[i - 1], adapter="ad-a")
        await fleet.settle()
        places = [*zip(worker.sources, (0, 1), strict=True), (single.sources[0], None)]
        for adapter, shift in ((None, 0), ("ad-a", 1)):
            requests = [RouteRequest(packed_tokens=pack_tokens(tokens), adapter=adapter) for tokens in prompts]
            decisions = [fleet.core.route(request) for request in requests]
            assert [(one.source, one.local_rank) for one in decisions] == [*places[shift:], *places[:shift]]
            assert {one.predicted_cached_tokens for one in decisions} == {400}
