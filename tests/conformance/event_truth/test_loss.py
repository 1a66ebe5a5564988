"""Batches that are lost, doubled, late or out of reach: the router's answer stays the tree's (cases 1-7)."""

from __future__ import annotations

import pytest

from router.ingest import SourceState
from tests.conformance.event_truth.engine import TruthEngine, silent_socket
from tests.conformance.event_truth.fleet import TruthFleet, TruthWorker, eventually

P = list(range(100, 124))
"""Six pages."""
Q = list(range(200, 216))
R = list(range(300, 316))


async def test_a_gap_is_filled_from_the_replay_ring_each_batch_once() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        lost = engine.published + 1
        worker.wires[0].fate = lambda seq: 0 if seq == lost else 1
        for tokens in (P[:8], P, Q, R):
            engine.store(tokens)
        await fleet.settle()
        assert fleet.assert_true(P, Q, R) == [{"w0": 24}, {"w0": 16}, {"w0": 16}]
        [source] = worker.sources
        assert fleet.core.ingest.stats(source).batches == engine.published
        assert fleet.core.ingest.stats(source).repeats == 0
        assert fleet.core.ingest.cursor(source).gaps >= 1


async def test_every_batch_twice_counts_once() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        worker.wires[0].fate = lambda _seq: 2
        for tokens in (P, Q, R):
            engine.store(tokens)
        engine.evict(16)
        await fleet.settle()
        fleet.assert_true(P, Q, R)
        assert fleet.core.ingest.cursor(worker.sources[0]).duplicates >= 3


async def test_a_replay_that_overruns_the_live_head_counts_once() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        first = engine.published
        worker.wires[0].fate = lambda seq: 0 if seq == first else 1
        engine.store(P)
        for start in range(40):  # the gap shows at the first of these; its replay meets the others on their way
            engine.store([1000 + start * 4 + i for i in range(4)])
        await fleet.settle()
        fleet.assert_true(P, *([1000 + start * 4 + i for i in range(4)] for start in range(40)))
        assert fleet.core.ingest.stats(worker.sources[0]).repeats == 0


async def test_a_gap_longer_than_the_ring_is_never_spliced_and_ends_by_a_snapshot() -> None:
    engine = TruthEngine(buffer_steps=2)
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        [source], [wire] = worker.sources, worker.wires
        worker.snapshots_work = False
        first = engine.published
        wire.fate = lambda seq: 0 if first <= seq < first + 6 else 1
        engine.store(P)
        engine.evict(8)
        for start in range(6):
            engine.store([1000 + start * 4 + i for i in range(4)])
        await worker.settled()
        await eventually(lambda: fleet.core.ingest.state(source) is SourceState.SYNCING, what="it is unsure")
        assert fleet.predicted(P) == {"w0": None}
        assert fleet.core.ingest.cursor(source).next_seq <= first
        worker.snapshots_work = True
        await fleet.settle()
        fleet.assert_true(P, *([1000 + start * 4 + i for i in range(4)] for start in range(6)))


async def test_a_gap_while_the_replay_socket_is_dead_ends_by_a_snapshot_and_holds_up_nobody() -> None:
    engines = [TruthEngine(), TruthEngine(dp_rank=1)]
    w0, w1 = (TruthWorker(f"w{i}", [engine]) for i, engine in enumerate(engines))
    with silent_socket() as silent:
        w0.replays = [silent]
        async with TruthFleet(w0, w1) as fleet:
            lost = engines[0].published
            w0.wires[0].fate = lambda seq: 0 if seq == lost else 1
            engines[0].store(P)
            engines[0].store(Q)
            source = w0.sources[0]
            await eventually(lambda: fleet.core.ingest.state(source) is SourceState.SYNCING, what="it waits")
            engines[1].store(R)
            other = w1.sources[0]
            await eventually(
                lambda: fleet.core.ingest.cursor(other).next_seq == engines[1].published, what="the other goes on"
            )
            assert fleet.core.ingest.state(source) is SourceState.SYNCING
            assert fleet.predicted(R)["w1"] == 16
            await fleet.settle()
            fleet.assert_true(P, Q, R)


async def test_a_lost_last_batch_is_found_without_any_traffic() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        first = engine.published
        worker.wires[0].fate = lambda seq: 0 if seq >= first else 1
        for tokens in (P, Q, R):
            engine.store(tokens)
        engine.evict(16)
        await fleet.settle()
        fleet.assert_true(P, Q, R)


async def test_a_lost_prefix_hides_its_suffix_until_it_is_there() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine], replay=False)
    async with TruthFleet(worker) as fleet:
        worker.snapshots_work = False
        first = engine.published
        worker.wires[0].fate = lambda seq: 0 if seq == first else 1
        engine.store(P[:8])
        engine.store(P)
        await eventually(
            lambda: fleet.core.ingest.state(worker.sources[0]) is SourceState.SYNCING, what="the gap is seen"
        )
        assert fleet.predicted(P) == {"w0": None}
        engine.clear()
        engine.store(P[:8])
        engine.store(P)
        worker.snapshots_work = True
        await fleet.settle()
        assert fleet.assert_true(P) == [{"w0": 24}]


async def test_a_router_that_joins_late_has_what_the_ring_has_not() -> None:
    engine = TruthEngine(buffer_steps=1)
    engine.store(P)
    worker = TruthWorker("w0", [engine])
    for tokens, adapter in ((Q, None), (R, None), (P[:4], "ad-a")):
        await worker.settled()
        engine.store(tokens, adapter=adapter)
    await worker.settled()
    engine.evict(8)
    async with TruthFleet(worker) as fleet:
        fleet.assert_true(P, Q, R)
        fleet.assert_true(P, adapter="ad-a")
        assert fleet.core.ingest.stats(worker.sources[0]).batches < engine.published


@pytest.mark.parametrize("kind", ["radix", "unified-rust"])
async def test_tails_that_are_evicted_are_gone(kind: str) -> None:
    engine = TruthEngine(kind=kind)
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        engine.store(P)
        for _ in range(6):
            engine.evict(4)
            await fleet.settle()
            fleet.assert_true(P)
        assert fleet.predicted(P) == {"w0": 0}
