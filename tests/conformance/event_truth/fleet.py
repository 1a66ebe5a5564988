"""A fleet without engines: real mirrors, snapshots, heartbeats and a real router's write path around TruthEngines."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

import msgspec
import zmq

from actors.mirror import Mirror
from router.attestation import HashForm
from router.core import RouterCore
from router.cost import CostWeights
from router.decision import RouteRequest
from router.hashing import pack_tokens
from router.ids import DpRank, Incarnation, LoraId, SourceId, WorkerId
from router.ingest import SourceState
from router.net.follower import Follower
from router.net.snapshots import SnapshotServer
from router.reports import (
    AdapterState,
    Holding,
    RankReport,
    Snapshot,
    SnapshotRequest,
    TableView,
    WorkerReport,
    WorkerState,
)
from tests.conformance.event_truth.engine import ADAPTERS, TruthEngine
from tests.lossy_wire import LossyWire

SETTLE_S: Final = 20.0
_BEAT_S: Final = 0.3
_LOOK_S: Final = 0.01


async def eventually(condition: Callable[[], object], *, what: str = "", within_s: float = SETTLE_S) -> None:
    """Until a condition holds; fails after `within_s`."""
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, f"not within {within_s} s: {what}"
        await asyncio.sleep(_LOOK_S)


class TruthWorker:
    """What a worker is to routers: heartbeats, a mirror, snapshots; its engine's ranks are TruthEngines."""

    def __init__(self, name: str, engines: Sequence[TruthEngine], *, replay: bool = True, **facts: Any) -> None:
        """`replay`: whether routers are told of a replay socket. `facts`: other fields of its reports."""
        self.worker_id = WorkerId(name)
        self.engines = list(engines)
        self.wires = [LossyWire(engine.endpoint, publish=partial(engine.publish, [])) for engine in engines]
        #: replay endpoints that routers are told, where they aren't the engines' own
        self.replays: list[str | None] = [engine.replay_endpoint if replay else None for engine in engines]
        self._facts = facts
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.heartbeat_endpoint = f"tcp://127.0.0.1:{port}"
        self._snapshots = SnapshotServer(self._snapshot, "127.0.0.1")
        self.snapshots_work = True
        self._tasks = [asyncio.ensure_future(work) for work in (self._beat(), self._snapshots.serve())]
        self.is_beating = True
        self.state = WorkerState.READY
        self._mirror: Mirror
        self._begin()

    @property
    def sources(self) -> list[SourceId]:
        """Of the present life, in the order of ranks."""
        return [SourceId(self.worker_id, self.incarnation, DpRank(engine.dp_rank)) for engine in self.engines]

    def _begin(self) -> None:
        self.incarnation = Incarnation(uuid.uuid4().hex[:8])
        own = [
            RankReport(dp_rank=DpRank(engine.dp_rank), endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint)
            for engine in self.engines
        ]
        engine = self.engines[0]
        self._mirror = Mirror(self.sources, own, HashForm(engine.page_size, engine.bigram, engine.dynamo))

    async def restart(self, *, told: bool = True) -> None:
        """The engines die and come back on their addresses; a worker tells it by a new incarnation."""
        await self._mirror.close()
        for engine, wire in zip(self.engines, self.wires, strict=True):
            engine.stop()
            wire.heard.clear()
            engine.start()
        if told:
            self._begin()

    async def settled(self) -> None:
        """Until the mirror has all that the engines have published."""
        await eventually(
            lambda: all(self._mirror.last_seq(DpRank(e.dp_rank)) == e.published - 1 for e in self.engines),
            what="mirror has all",
        )

    def report(self) -> WorkerReport:
        """The heartbeat."""
        engine = self.engines[0]
        ranks = tuple(
            RankReport(
                dp_rank=source.dp_rank,
                endpoint=wire.endpoint,
                replay_endpoint=replay,
                last_seq=self._mirror.last_seq(source.dp_rank),
            )
            for source, wire, replay in zip(self.sources, self.wires, self.replays, strict=True)
        )
        report = WorkerReport(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            state=self.state,
            url="http://nobody",
            ranks=ranks,
            page_size=engine.page_size,
            bigram=engine.bigram,
            snapshot_endpoint=self._snapshots.endpoint,
        )
        return msgspec.structs.replace(report, **self._facts)

    async def close(self) -> None:
        """End everything."""
        await self.close_all_but_engines()
        for engine in self.engines:
            engine.stop()

    async def close_all_but_engines(self) -> None:
        """End everything that isn't an engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._mirror.close()
        self._snapshots.close()
        self._context.destroy(linger=0)
        for wire in self.wires:
            wire.close()

    def _snapshot(self, request: SnapshotRequest) -> Snapshot:
        if not self.snapshots_work:
            return Snapshot(
                incarnation=request.incarnation, dp_rank=request.dp_rank, last_seq=-1, blocks={}, error="out of order"
            )
        return self._mirror.snapshot(request)

    async def _beat(self) -> None:
        while True:
            if self.is_beating:
                self._socket.send(msgspec.msgpack.encode(self.report()))
            await asyncio.sleep(_BEAT_S)


class TruthFleet:
    """Workers and one router's write path. `async with`; on the way out, invariants are checked."""

    def __init__(self, *workers: TruthWorker, adapters: Mapping[str, str] = ADAPTERS) -> None:
        """`adapters`: what every engine holds, lora_id by name."""
        self._adapters = dict(adapters)
        self.workers = {worker.worker_id: worker for worker in workers}
        self.core = RouterCore(CostWeights(), rng=random.Random(1))
        self._version = 0
        self._follower = Follower(self.core)
        self._watching = asyncio.ensure_future(self._follower.watch())
        self._follower.follow({w.worker_id: w.heartbeat_endpoint for w in workers})

    async def __aenter__(self) -> Self:
        await self.known()
        self.load(self._adapters)
        for worker in self.workers.values():
            for wire in worker.wires:
                await asyncio.to_thread(wire.connect)
        await self.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.core.check()
        self._watching.cancel()
        await self._follower.close()
        for worker in self.workers.values():
            await worker.close()

    async def known(self) -> None:
        """Until all workers of their present lives are followed."""
        await eventually(
            lambda: all(
                worker.worker_id in self.core.workers
                and self.core.workers[worker.worker_id].sources == tuple(worker.sources)
                for worker in self.workers.values()
            ),
            what="workers are known",
        )

    def load(self, adapters: dict[str, str]) -> None:
        """Tell the router that every worker's engine holds these: lora_id by name."""
        self._version += 1
        holdings = tuple(
            Holding(
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                lora_id=LoraId(lora_id),
                name=name,
                content_id=lora_id,
                state=AdapterState.LOADED,
            )
            for worker in self.workers.values()
            for name, lora_id in adapters.items()
        )
        self.core.update_table(TableView(epoch="e", version=self._version, names=tuple(adapters), holdings=holdings))

    async def settle(self) -> None:
        """Until every engine's batches are all applied, here and in the mirrors, and all is exact."""
        for worker in self.workers.values():
            await worker.settled()
            for source, engine in zip(worker.sources, worker.engines, strict=True):
                await eventually(
                    lambda source=source, engine=engine: (  # type: ignore[misc]  # bound here
                        source in self.core.ingest
                        and self.core.ingest.state(source) is SourceState.EXACT
                        and self.core.ingest.cursor(source).next_seq == engine.published
                    ),
                    what=f"{source} has all",
                )

    def predicted(
        self,
        tokens: Sequence[int],
        *,
        adapter: str | None = None,
        salt: str | None = None,
        extra: str | None = None,
    ) -> dict[str, int | None]:
        """The router's answer by worker, or worker/rank past its first rank: tokens of full pages."""
        request = RouteRequest(
            packed_tokens=pack_tokens([*tokens, 0]), adapter=adapter, extra_key=extra, cache_salt=salt
        )
        return {
            name: self.core.predict(source, request)
            for worker in self.workers.values()
            for name, source in zip(_names(worker), worker.sources, strict=True)
        }

    def truth(
        self,
        tokens: Sequence[int],
        *,
        adapter: str | None = None,
        salt: str | None = None,
        extra: str | None = None,
    ) -> dict[str, int]:
        """The trees' answer to the same question."""
        return {
            name: engine.cached(tokens, adapter=adapter, salt=salt, extra=extra)
            for worker in self.workers.values()
            for name, engine in zip(_names(worker), worker.engines, strict=True)
        }

    def assert_true(self, *prompts: Sequence[int], **names: Any) -> list[dict[str, int]]:
        """Router and trees agree on every prompt; returns the answers."""
        answers = []
        for tokens in prompts:
            truth = self.truth(tokens, **names)
            assert self.predicted(tokens, **names) == truth, (tokens, names)
            answers.append(truth)
        return answers


def _names(worker: TruthWorker) -> list[str]:
    first = worker.engines[0].dp_rank
    return [worker.worker_id + f"/r{e.dp_rank}" * (e.dp_rank > first) for e in worker.engines]
