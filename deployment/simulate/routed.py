"""Our policy in the simulation: the product's own RouterCore, fed with reports, table copies and event batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import Any, Final

import msgspec

from deployment.simulate.fleet import Flight, News, Simulation
from router.booking import Booking
from router.core import RouterCore
from router.cost import CostWeights
from router.cursor import SeqPayload
from router.decision import RouteRequest
from router.effects import Effect, RequestReplay, RequestSnapshot, Subscribe
from router.ids import DpRank, Incarnation, LoraId, SourceId, WorkerId
from router.reports import AdapterState, Holding, RankReport, TableView, WorkerReport, WorkerState

_encode: Final = msgspec.msgpack.Encoder().encode
_CONTEXT: Final = 1 << 20


class Routed:
    """A Policy. Batches reach the core as bytes, as SGLang would send them, but for token_ids."""

    def __init__(self, sim: Simulation, seed: int, weights: CostWeights | None = None) -> None:
        self.core = RouterCore(weights or CostWeights(), rng=random.Random(seed))
        self._sim = sim
        self._lives = count()
        self._versions = count()
        self._sources: dict[int, SourceId] = {}
        self._seqs: dict[SourceId, int] = {}
        names = sorted({f.call.adapter for f in sim.flights} - {None})  # type: ignore[type-var]
        self._lora_ids: dict[str, LoraId] = {name: sim.prompts.lora_id(name) for name in names if name is not None}
        for worker in range(len(sim.workers)):
            self._report(worker)
        self._update_table()

    def choose(self, flight: Flight, now_s: float, alive: Sequence[int]) -> int:
        """See Policy."""
        decision = self.core.route(
            RouteRequest(
                now_s=now_s,
                packed_tokens=flight.prompt.packed,
                adapter=flight.call.adapter,
                max_output_tokens=flight.call.num_output,
            )
        )
        flight.predicted = decision.predicted_cached_tokens
        flight.token = self.core.book(decision, now_s=now_s)
        return int(decision.source.worker_id[1:])

    def first_token(self, flight: Flight, now_s: float) -> None:
        """See Policy."""
        self._booking(flight).first_token(now_s=now_s)

    def ended(self, flight: Flight, now_s: float) -> None:
        """See Policy."""
        self._booking(flight).finish(now_s=now_s, output_tokens=flight.call.num_output)
        if flight.ended_s is not None:
            self.core.load.learn_output(flight.call.num_output)

    def heard(self, worker: int, batch: list[News], now_s: float) -> None:
        """See Policy."""
        source = self._sources[worker]
        attestor = self.core.ingest.attestor(source)
        whole = attestor is not None and attestor.is_open
        payload = _encode([now_s, [self._event(news, whole) for news in batch], source.dp_rank])
        seq = self._seqs[source]
        self._seqs[source] += 1
        self._perform(self.core.ingest.live(source, SeqPayload(seq, payload), now_s=now_s))

    def died(self, worker: int, now_s: float) -> None:
        """See Policy."""
        self._perform(self.core.forget(WorkerId(f"w{worker}")))

    def returned(self, worker: int, now_s: float) -> None:
        """See Policy."""
        self._report(worker)
        self._update_table()

    def reloaded(self, adapter: str, lora_id: LoraId) -> None:
        """See Policy."""
        self._lora_ids[adapter] = lora_id
        self._update_table()

    def _booking(self, flight: Flight) -> Booking:
        assert isinstance(flight.token, Booking)
        return flight.token

    def _event(self, news: News, whole: bool) -> dict[str, Any]:
        """As SGLang sends it; token_ids only where they are read."""
        if not news.stored:
            return {"type": "BlockRemoved", "block_hashes": news.hashes, "medium": "GPU"}
        event: dict[str, Any] = {"type": "BlockStored", "block_hashes": news.hashes, "medium": "GPU"}
        if whole:
            page_size = self._sim.page_size
            name = self._sim.prompts.meaning[news.hashes[0]][0]
            tokens = [page for h in news.hashes for page in [self._sim.prompts.meaning[h][1]] * page_size]
            event |= {"parent_block_hash": news.parent, "token_ids": tokens, "block_size": page_size, "lora_name": name}
        return event

    def _report(self, worker: int) -> None:
        source = SourceId(WorkerId(f"w{worker}"), Incarnation(f"life{next(self._lives)}"), DpRank(worker))
        self._sources[worker], self._seqs[source] = source, 0
        report = WorkerReport(
            worker_id=source.worker_id,
            incarnation=source.incarnation,
            state=WorkerState.READY,
            url=f"http://{source.worker_id}",
            ranks=(RankReport(dp_rank=source.dp_rank, endpoint="tcp://sim"),),
            page_size=self._sim.page_size,
            context_length=_CONTEXT,
            max_total_tokens=self._sim.workers[worker].model.kv_tokens,
            max_loras_per_batch=self._sim.settings.num_slots,
        )
        self._perform(self.core.report(report))

    def _update_table(self) -> None:
        holdings = tuple(
            Holding(
                worker_id=source.worker_id,
                incarnation=source.incarnation,
                lora_id=lora_id,
                name=name,
                content_id="",
                state=AdapterState.LOADED,
            )
            for source in self._sources.values()
            for name, lora_id in self._lora_ids.items()
        )
        self.core.update_table(
            TableView(epoch="sim", version=next(self._versions), names=tuple(self._lora_ids), holdings=holdings)
        )

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Subscribe | RequestReplay):  # nothing came before
                self._perform(self.core.ingest.replayed(effect.source, [], now_s=self._sim.now_s))
            elif isinstance(effect, RequestSnapshot):
                raise AssertionError("nothing is lost for good here")
