"""Claims of router/net/arrival.py: an answer is held for what its engine published before it, and for nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from router.core import RouterCore
from router.cost import CostWeights
from router.cursor import SeqPayload
from router.ids import DpRank, Incarnation, SourceId, WorkerId
from router.net import arrival
from router.net.arrival import MAX_TIMEOUTS, ArrivalGate
from router.net.usage import Usage
from router.reports import RankReport, WorkerReport, WorkerState

SOURCE = SourceId(WorkerId("w0"), Incarnation("i"), DpRank(0))
EMPTY = msgspec.msgpack.encode([0.0, [], 0])


class Wire:
    """Batches that arrive one at a time, each after some looks."""

    def __init__(self, core: RouterCore, looks: list[int]) -> None:
        self._core = core
        self._looks = looks
        self._seq = 0
        self.num_looks = 0

    def drain(self, source: SourceId) -> None:
        self.num_looks += 1
        while self._looks and self._looks[0] <= self.num_looks:
            self._looks.pop(0)
            self._core.ingest.live(source, SeqPayload(self._seq, EMPTY), now_s=0.0)
            self._seq += 1


@pytest.fixture
def gate() -> Callable[[list[int]], tuple[ArrivalGate, Wire, RouterCore]]:
    def make(looks: list[int]) -> tuple[ArrivalGate, Wire, RouterCore]:
        core = RouterCore(CostWeights(), rng=random.Random(0))
        report = WorkerReport(
            worker_id=SOURCE.worker_id,
            incarnation=SOURCE.incarnation,
            state=WorkerState.READY,
            ranks=(RankReport(dp_rank=SOURCE.dp_rank, endpoint="none"),),
            page_size=16,
        )
        core.report(report)
        core.ingest.replayed(SOURCE, [], now_s=0.0)
        wire = Wire(core, looks)
        return ArrivalGate(core, wire.drain), wire, core

    return make


Gate = Callable[[list[int]], tuple[ArrivalGate, Wire, RouterCore]]


@pytest.mark.parametrize(
    ("usage", "num_batches"),
    [
        (Usage(prompt_tokens=15, completion_tokens=1, cached_tokens=0), 0),
        (Usage(prompt_tokens=16, completion_tokens=1, cached_tokens=0), 1),
        (Usage(prompt_tokens=40, completion_tokens=2, cached_tokens=32), 0),
        (Usage(prompt_tokens=40, completion_tokens=9, cached_tokens=32), 1),
        (Usage(prompt_tokens=40, completion_tokens=9, cached_tokens=0), 2),
        (Usage(prompt_tokens=48, completion_tokens=1, cached_tokens=0), 1),
        (Usage(prompt_tokens=40, completion_tokens=0, cached_tokens=0), 0),
    ],
)
async def test_it_waits_for_as_many_batches_as_the_request_must_cause(
    gate: Gate, usage: Usage, num_batches: int
) -> None:
    arrivals, wire, core = gate([3 + i for i in range(num_batches)])

    await arrivals.settle(SOURCE, arrivals.mark(SOURCE), usage)

    assert core.ingest.cursor(SOURCE).next_seq == num_batches
    assert wire.num_looks == (2 + num_batches if num_batches else 1)


async def test_what_came_before_the_request_does_not_count(gate: Gate) -> None:
    arrivals, _, core = gate([1, 4])
    arrivals._drain(SOURCE)

    await arrivals.settle(SOURCE, arrivals.mark(SOURCE), Usage(32, 1, 0))

    assert core.ingest.cursor(SOURCE).next_seq == 2


async def test_it_gives_up_and_after_some_vain_waits_holds_nothing_until_one_would_pass(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "WAIT_S", 0.003)
    arrivals, wire, core = gate([])
    for _ in range(MAX_TIMEOUTS):
        await arrivals.settle(SOURCE, arrivals.mark(SOURCE), Usage(32, 1, 0))
    looks = wire.num_looks

    await arrivals.settle(SOURCE, arrivals.mark(SOURCE), Usage(32, 1, 0))
    assert wire.num_looks == looks + 1, "not held"

    mark = arrivals.mark(SOURCE)
    core.ingest.live(SOURCE, SeqPayload(0, EMPTY), now_s=0.0)
    await arrivals.settle(SOURCE, mark, Usage(32, 1, 0))
    looks = wire.num_looks
    await arrivals.settle(SOURCE, arrivals.mark(SOURCE), Usage(32, 1, 0))
    assert wire.num_looks > looks + 1, "held again"


async def test_a_source_that_is_gone_or_unsure_holds_nothing(gate: Gate) -> None:
    arrivals, wire, core = gate([])
    mark = arrivals.mark(SOURCE)
    core.ingest.replay_failed(SOURCE)
    await arrivals.settle(SOURCE, mark, Usage(32, 1, 0))
    core.forget(SOURCE.worker_id)
    await arrivals.settle(SOURCE, mark, Usage(32, 1, 0))

    assert wire.num_looks == 2
