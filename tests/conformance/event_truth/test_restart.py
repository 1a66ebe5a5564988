"""Engines that die, come back or fall silent: nothing of a former life is ever claimed (cases 5, 6)."""

from __future__ import annotations

from router.core import RouterCore
from router.ids import WorkerId
from tests.conformance.event_truth.engine import TruthEngine
from tests.conformance.event_truth.fleet import TruthFleet, TruthWorker, eventually

P = list(range(100, 124))
Q = list(range(200, 216))


def is_silent(core: RouterCore, worker_id: WorkerId) -> bool:
    record = core.workers.get(worker_id)
    return record is None or record.silent


async def test_a_restart_that_is_told_leaves_only_blocks_of_the_new_life() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        engine.store(P)
        await fleet.settle()
        await worker.restart()
        await fleet.known()
        engine.store(Q)
        await fleet.settle()
        assert fleet.assert_true(P, Q) == [{"w0": 0}, {"w0": 16}]
        assert fleet.core.restarts[worker.worker_id] == 1


async def test_a_restart_whose_new_seq_has_passed_the_old_is_no_continuation() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        engine.store(P)
        await fleet.settle()
        before = engine.published
        await worker.restart()
        for start in range(before + 5):
            engine.store([1000 + start * 4 + i for i in range(4)])
        engine.store(Q)
        await fleet.known()
        await fleet.settle()
        assert engine.published > before
        assert fleet.assert_true(P, Q, [1000, 1001, 1002, 1003]) == [{"w0": 0}, {"w0": 16}, {"w0": 4}]


async def test_batches_published_before_anybody_listens_are_not_lost() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    engine.store(P)
    engine.store(Q)
    async with TruthFleet(worker) as fleet:
        assert fleet.assert_true(P, Q) == [{"w0": 24}, {"w0": 16}]


async def test_a_dead_worker_that_nobody_deregistered_is_claimed_no_more_and_the_others_are() -> None:
    w0, w1 = (TruthWorker(f"w{i}", [TruthEngine(dp_rank=i)]) for i in range(2))
    async with TruthFleet(w0, w1) as fleet:
        for worker in (w0, w1):
            worker.engines[0].store(P)
        await fleet.settle()
        assert fleet.predicted(P) == {"w0": 24, "w1": 24}
        w0.is_beating = False
        w0.engines[0].stop()
        await eventually(lambda: is_silent(fleet.core, w0.worker_id), what="silence is noticed")
        assert fleet.predicted(P) == {"w0": None, "w1": 24}
        w0.engines[0].start()
        w0.is_beating = True
        await eventually(lambda: not is_silent(fleet.core, w0.worker_id), what="it is heard again")
