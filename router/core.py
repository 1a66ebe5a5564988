"""RouterCore: all routing state and the decision. No IO, clock, Ray, threads; one event loop owns it.

Theory of operation. Workers report themselves (WorkerReport), the LoRA table sends whole copies of itself
(TableView), event batches go to EventIngest. `route` recomputes the hashes that each candidate's engine would
publish for the prompt, follows them in the index, and picks the least cost; `explain` shows all candidates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from router.cost import NEAR_TIE_MS, Costs, CostWeights, estimate
from router.decision import Candidate, Decision, Reason, RouteRequest
from router.effects import Effect, Subscribe, Unsubscribe
from router.errors import NoCapacity
from router.hashing import TOKEN_BYTES, Namespace
from router.ids import Incarnation, LoraId, SourceId, WorkerId
from router.ingest import EventIngest, SourceState
from router.load import Booking, LoadBook
from router.prompt import PromptHasher
from router.reports import AdapterState, TableView, WorkerReport, WorkerState

MAX_RESERVED_BLOCKS = 1 << 22
"""Beyond this, room is made as blocks come: what caches could hold needn't be distinct, nor ever be there."""


@dataclass(slots=True)
class WorkerRecord:
    """A worker's latest report and its sources, in the order of its ranks."""

    report: WorkerReport
    sources: tuple[SourceId, ...] = ()


@dataclass(frozen=True, slots=True)
class _Target:
    """A source that requests may go to."""

    record: WorkerRecord
    source: SourceId
    column: int


@dataclass(slots=True)
class _Evaluation:
    """Candidates of one request, all sequences parallel."""

    targets: list[_Target]
    states: list[SourceState]
    lora_ids: list[LoraId | None]
    predicted: list[int | None]
    costs: Costs


class RouterCore:
    """See the module. Mutators: `report`, `forget`, `update_table`, `book`, and those of `ingest`."""

    def __init__(self, weights: CostWeights, *, rng: random.Random, hash_seed: int = 0, min_blocks: int = 0) -> None:
        self.ingest = EventIngest(min_blocks=min_blocks)
        self.load = LoadBook(prefill_tokens_per_s=weights.prefill_tokens_per_s)
        self.table = TableView(epoch="", version=-1)
        #: workers that have reported and weren't forgotten
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self._weights = weights
        self._rng = rng
        self._hash_seed = hash_seed
        self._hashers: dict[tuple[int, bool], PromptHasher] = {}
        #: all and only loaded adapters of the table copy
        self._loaded: dict[tuple[WorkerId, Incarnation, str], LoraId] = {}
        #: all and only sources of ready workers, in the order of workers
        self._routable: list[_Target] = []

    # -- write path ----------------------------------------------------------------------------------------------

    def report(self, report: WorkerReport) -> list[Effect]:
        """A worker's heartbeat. A new incarnation voids the old one, its blocks and its bookings at once."""
        record = self.workers.get(report.worker_id)
        effects: list[Effect] = []
        if record is not None and record.report.incarnation != report.incarnation:
            effects += self.forget(report.worker_id)
            record = None
        if record is None:
            record = self.workers[report.worker_id] = WorkerRecord(report)
        changed = record.report.state != report.state
        record.report = report
        if not record.sources and report.ranks:
            effects += self._add_sources(record)
            changed = True
        if changed:
            self._refresh_routable()
        for source, rank in zip(record.sources, report.ranks, strict=False):
            if rank.last_seq is not None:
                effects += self.ingest.announced(source, rank.last_seq)
        return effects

    def forget(self, worker_id: WorkerId) -> list[Effect]:
        """The worker is gone, or its engine life is."""
        record = self.workers.pop(worker_id, None)
        if record is None:
            return []
        for source in record.sources:
            self.load.reset(self.ingest.column(source))
            self.ingest.discard(source)
        self._refresh_routable()
        return [Unsubscribe(source) for source in record.sources]

    def update_table(self, view: TableView) -> bool:
        """Take a copy of the LoRA table; an older version of the same epoch changes nothing. True if taken."""
        if view.epoch == self.table.epoch and view.version <= self.table.version:
            return False
        self.table = view
        self._loaded = {
            (row.worker_id, row.incarnation, row.name): row.lora_id
            for row in view.holdings
            if row.state is AdapterState.LOADED
        }
        return True

    # -- read path -----------------------------------------------------------------------------------------------

    def route(self, request: RouteRequest) -> Decision:
        """The source with the least cost; near ties go to the fewest running requests, then at random.

        Raises:
            NoCapacity: no ready worker can serve the request.
        """
        found = self._evaluate(request)
        total = found.costs.total
        near = np.flatnonzero(total <= total.min() + NEAR_TIE_MS)
        if len(near) > 1:
            running = self.load.running[[found.targets[i].column for i in near.tolist()]]
            near = near[running == running.min()]
        return self._decision(request, found, int(near[0] if len(near) == 1 else self._rng.choice(near)))

    def explain(self, request: RouteRequest) -> list[Candidate]:
        """Every source that `route` would weigh, cheapest first. Changes nothing."""
        found = self._evaluate(request)
        order = np.argsort(found.costs.total, kind="stable")
        return [
            Candidate(
                source=found.targets[i].source,
                state=found.states[i],
                predicted_cached_tokens=found.predicted[i],
                cost_ms=round(float(found.costs.total[i]), 3),
                terms=found.costs.row(i),
            )
            for i in order.tolist()
        ]

    def book(self, decision: Decision, *, now_s: float) -> Booking:
        """Book a decision that is about to be carried out."""
        return self.load.book(decision.column, tokens=decision.uncached_tokens, lora_id=decision.lora_id, now_s=now_s)

    def least_loaded(self) -> WorkerRecord | None:
        """The ready worker with the fewest running requests."""
        if not self._routable:
            return None
        return min(self._routable, key=lambda target: int(self.load.running[target.column])).record

    def loaded(self, record: WorkerRecord, adapter: str) -> LoraId | None:
        """lora_id under which the worker's engine holds `adapter`, or None."""
        return self._loaded.get((record.report.worker_id, record.report.incarnation, adapter))

    def check(self) -> None:
        """Invariants; called at the teardown of every test."""
        self.ingest.check()
        self.load.check()
        columns = [self.ingest.column(source) for record in self.workers.values() for source in record.sources]
        assert len(set(columns)) == len(columns)
        assert {target.source for target in self._routable} <= {s for r in self.workers.values() for s in r.sources}

    # -- inside --------------------------------------------------------------------------------------------------

    def _add_sources(self, record: WorkerRecord) -> list[Effect]:
        report = record.report
        sources = [SourceId(report.worker_id, report.incarnation, rank.dp_rank) for rank in report.ranks]
        record.sources = tuple(sources)
        for source in sources:
            self.load.widen(self.ingest.add(source) + 1)
        self.ingest.index.reserve(min(MAX_RESERVED_BLOCKS, sum(map(_capacity_blocks, self.workers.values()))))
        return [
            Subscribe(source, rank.endpoint, rank.replay_endpoint)
            for source, rank in zip(sources, report.ranks, strict=True)
        ]

    def _refresh_routable(self) -> None:
        self._routable = [
            _Target(record, source, self.ingest.column(source))
            for record in self.workers.values()
            if record.report.state is WorkerState.READY
            for source in record.sources
        ]

    def _evaluate(self, request: RouteRequest) -> _Evaluation:
        targets: list[_Target] = []
        lora_ids: list[LoraId | None] = []
        for target in self._routable:
            if target.source.worker_id in request.exclude:
                continue
            lora_id = None
            if request.adapter is not None and (lora_id := self.loaded(target.record, request.adapter)) is None:
                continue
            targets.append(target)
            lora_ids.append(lora_id)
        if not targets:
            raise NoCapacity(self._why_none(request))
        states = [self.ingest.state(target.source) for target in targets]
        predicted = self._predict(request, targets, lora_ids, states)
        num_tokens = len(request.packed_tokens or b"") // TOKEN_BYTES
        costs = estimate(
            self.load,
            self._weights,
            np.array([target.column for target in targets]),
            uncached_tokens=np.array([float(num_tokens - (cached or 0)) for cached in predicted]),
            lora_ids=lora_ids,
            num_slots=np.array([target.record.report.max_loras_per_batch for target in targets]),
        )
        return _Evaluation(targets, states, lora_ids, predicted, costs)

    def _predict(
        self,
        request: RouteRequest,
        targets: Sequence[_Target],
        lora_ids: Sequence[LoraId | None],
        states: Sequence[SourceState],
    ) -> list[int | None]:
        """Cached tokens to expect at each source; None where it can't be known. One walk per namespace."""
        predicted: list[int | None] = [None] * len(targets)
        packed = request.packed_tokens
        if packed is None:
            return predicted
        groups: dict[tuple[int, bool, bool, LoraId | None], list[int]] = {}
        for i, target in enumerate(targets):
            report = target.record.report
            has_key = lora_ids[i] is not None or request.extra_key is not None  # which only dynamo hashes tell apart
            if states[i] is not SourceState.EXACT or (has_key and not report.dynamo_format):
                continue
            key = (report.page_size, report.bigram, report.dynamo_format, lora_ids[i])
            groups.setdefault(key, []).append(i)
        limit = len(packed) // TOKEN_BYTES - 1  # the engine always computes the last token
        if request.max_cached_tokens is not None:
            limit = min(limit, request.max_cached_tokens)
        for (page_size, bigram, dynamo, lora_id), members in groups.items():
            namespace = Namespace.of(
                extra_key=request.extra_key, lora_id=lora_id, cache_salt=request.cache_salt, dynamo=dynamo
            )
            hasher = self._hasher(page_size, bigram)
            num_pages = min(hasher.num_pages(packed), max(0, limit) // page_size)
            columns = [targets[i].column for i in members]
            depth = self.ingest.index.match(hasher.pages(packed, namespace, num_pages=num_pages), columns)
            for i, column in zip(members, columns, strict=True):
                predicted[i] = int(depth[column]) * page_size
        return predicted

    def _hasher(self, page_size: int, bigram: bool) -> PromptHasher:
        key = (page_size, bigram)
        if key not in self._hashers:
            self._hashers[key] = PromptHasher(page_size=page_size, bigram=bigram, seed=self._hash_seed)
        return self._hashers[key]

    def _decision(self, request: RouteRequest, found: _Evaluation, i: int) -> Decision:
        target, predicted = found.targets[i], found.predicted[i]
        record, source = target.record, target.source
        num_tokens = None if request.packed_tokens is None else len(request.packed_tokens) // TOKEN_BYTES
        return Decision(
            source=source,
            url=record.report.url,
            local_rank=record.sources.index(source) if len(record.sources) > 1 else None,
            column=target.column,
            lora_id=found.lora_ids[i],
            adapter=request.adapter,
            reason=_reason(num_tokens, predicted, found.predicted),
            prompt_tokens=num_tokens,
            predicted_cached_tokens=predicted,
            uncached_tokens=(num_tokens or 0) - (predicted or 0),
            cost_ms=float(found.costs.total[i]),
        )

    def _why_none(self, request: RouteRequest) -> str:
        ready = sum(record.report.state is WorkerState.READY for record in self.workers.values())
        if not ready:
            return f"none of {len(self.workers)} workers is ready"
        if request.exclude:
            return f"{len(request.exclude)} workers failed this request and none is left"
        return f"adapter {request.adapter!r} is not loaded on any of {ready} ready workers yet"


def _capacity_blocks(record: WorkerRecord) -> int:
    """Blocks that the worker's caches can hold."""
    report = record.report
    return len(record.sources) * report.max_total_tokens // max(1, report.page_size)


def _reason(num_tokens: int | None, chosen: int | None, predicted: Sequence[int | None]) -> Reason:
    if num_tokens is None:
        return Reason.NOT_TOKENIZED
    if chosen is None:
        return Reason.SYNCING
    best = max(cached or 0 for cached in predicted)
    if best > chosen:
        return Reason.SPILL
    return Reason.CACHED_PREFIX if chosen else Reason.LEAST_LOADED
