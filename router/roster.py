"""The roster: workers as they report themselves, their sources, and what the LoRA table says they hold.

The write path of RouterCore beside the event streams. Knows which sources requests may go to, not which is best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from router.attestation import Attestor, HashForm
from router.effects import Effect, Subscribe, Unsubscribe
from router.holders import Holders, Target, WorkerRecord
from router.ids import Incarnation, LoraId, SourceId, WorkerId
from router.ingest import EventIngest
from router.load import LoadBook
from router.reports import AdapterState, TableView, WorkerReport, WorkerState

MAX_RESERVED_BLOCKS = 1 << 22
"""Beyond this, room is made as blocks come: what caches could hold needn't be distinct, nor ever be there."""
MAX_HOLDERS = 1024
"""Adapters whose holders are remembered, the base model being one."""
_UNKNOWN = HashForm(0)


class Roster:
    """See the module. Mutators: `report`, `silence`, `suspend`, `forget`, `update_table`."""

    def __init__(self, ingest: EventIngest, load: LoadBook, *, extra_keys: Collection[str]) -> None:
        """`extra_keys`: those that requests have used lately; a live view, for attestation."""
        self._ingest = ingest
        self._load = load
        self._extra_keys = extra_keys
        self.table = TableView(epoch="", version=-1)
        #: workers that have reported and weren't forgotten
        self.workers: dict[WorkerId, WorkerRecord] = {}
        #: engine lives that were followed by another, by worker
        self.restarts: Counter[WorkerId] = Counter()
        #: all and only sources of ready workers, in the order of workers; silent and suspended ones only where all are
        self.routable: list[Target] = []
        #: those of them that hold an adapter, as asked for since anything of this changed
        self._holders: dict[str | None, Holders] = {}
        #: all and only loaded adapters of the table copy
        self._loaded: dict[tuple[WorkerId, Incarnation], dict[str, LoraId]] = {}

    def report(self, report: WorkerReport) -> list[Effect]:
        """A worker's heartbeat. A new incarnation voids the old one, its blocks and its bookings at once."""
        record = self.workers.get(report.worker_id)
        effects: list[Effect] = []
        if record is not None and record.report.incarnation != report.incarnation:
            effects += self.forget(report.worker_id)
            self.restarts[report.worker_id] += 1
            record = None
        if record is None:
            record = self.workers[report.worker_id] = WorkerRecord(report, _UNKNOWN, {})
            self._expect(record)
        changed = record.silent or _limits(record.report) != _limits(report)
        record.report, record.silent = report, False
        if not record.sources and report.ranks:
            effects += self._add_sources(record)
            changed = True
        if changed:
            self._refresh_routable()
        for source, rank in zip(record.sources, report.ranks, strict=False):
            if report.fault:
                self._ingest.condemn(source, report.fault)
            if rank.load is not None:
                if record.max_running != rank.load.max_running:
                    record.max_running = rank.load.max_running
                    self._holders.clear()
                self._load.reported(self._ingest.column(source), rank.load.running + rank.load.waiting)
            if rank.last_seq is not None:
                effects += self._ingest.announced(source, rank.last_seq)
        return effects

    def forget(self, worker_id: WorkerId) -> list[Effect]:
        """The worker is gone, or its engine life is."""
        record = self.workers.pop(worker_id, None)
        if record is None:
            return []
        for source in record.sources:
            self._load.reset(self._ingest.column(source))
            self._ingest.discard(source)
        self._refresh_routable()
        return [Unsubscribe(source) for source in record.sources]

    def silence(self, worker_id: WorkerId) -> None:
        """The worker hasn't been heard for a while. Its next report makes up for it."""
        record = self.workers.get(worker_id)
        if record is not None and not record.silent:
            record.silent = True
            self._refresh_routable()

    def suspend(self, worker_id: WorkerId, *, suspended: bool) -> None:
        """The worker's engine fails, or it is well again. Another incarnation isn't suspended."""
        record = self.workers.get(worker_id)
        if record is not None and record.suspended is not suspended:
            record.suspended = suspended
            self._refresh_routable()

    def update_table(self, view: TableView) -> bool:
        """Take a copy of the LoRA table; an older version of the same epoch changes nothing. True if taken."""
        if view.epoch == self.table.epoch and view.version <= self.table.version:
            return False
        self.table = view
        former, self._loaded = self._loaded, {}
        for row in view.holdings:
            if row.state is not AdapterState.LOADED:
                continue
            life = (row.worker_id, row.incarnation)
            self._loaded.setdefault(life, {})[row.name] = row.lora_id
            if row.load_s and former.get(life, {}).get(row.name) != row.lora_id:
                self._load.learn_adapter_load(row.load_s * 1000)
        for record in self.workers.values():
            self._expect(record)
        return True

    def lose_adapter(self, worker_id: WorkerId, adapter: str) -> None:
        """A worker's engine doesn't hold the adapter, whatever the table says; the next copy decides."""
        record = self.workers.get(worker_id)
        if record is not None:
            record.adapters = {name: lora_id for name, lora_id in record.adapters.items() if name != adapter}
            self._holders.pop(adapter, None)

    def holders(self, adapter: str | None) -> Holders:
        """Sources that requests for the adapter may go to; all for the base model."""
        found = self._holders.get(adapter)
        if found is None:
            if len(self._holders) >= MAX_HOLDERS:
                self._holders.clear()
            found = self._holders[adapter] = Holders.of(self.routable, adapter)
        return found

    def check(self) -> None:
        """Invariants; for tests."""
        for adapter, found in self._holders.items():
            now = Holders.of(self.routable, adapter)
            assert (found.targets, found.lora_ids) == (now.targets, now.lora_ids), adapter
            for kept, made in zip(found.arrays, now.arrays, strict=True):
                assert kept.tolist() == made.tolist(), adapter
        columns = [self._ingest.column(source) for record in self.workers.values() for source in record.sources]
        assert len(set(columns)) == len(columns)
        assert {target.source for target in self.routable} <= {s for r in self.workers.values() for s in r.sources}

    def _add_sources(self, record: WorkerRecord) -> list[Effect]:
        report = record.report
        sources = [SourceId(report.worker_id, report.incarnation, rank.dp_rank) for rank in report.ranks]
        record.sources = tuple(sources)
        record.form = HashForm(report.page_size, report.bigram, report.dynamo_format)
        for source in sources:
            attestor = Attestor(record.form, extra_keys=self._extra_keys)
            self._load.widen(self._ingest.add(source, attestor) + 1)
        self._expect(record)
        self._ingest.index.reserve(min(MAX_RESERVED_BLOCKS, sum(map(_capacity_blocks, self.workers.values()))))
        return [
            Subscribe(source, rank.endpoint, rank.replay_endpoint)
            for source, rank in zip(sources, report.ranks, strict=True)
        ]

    def _expect(self, record: WorkerRecord) -> None:
        """Take from the table what the worker's engine holds."""
        report = record.report
        self._holders.clear()
        record.adapters = self._loaded.get((report.worker_id, report.incarnation), {})
        for source in record.sources:
            if (attestor := self._ingest.attestor(source)) is not None:
                attestor.expect(record.adapters)

    def _refresh_routable(self) -> None:
        ready = [record for record in self.workers.values() if record.report.state is WorkerState.READY]
        heard = [record for record in ready if not record.silent]
        well = [record for record in heard if not record.suspended]
        self._holders.clear()
        self.routable = [
            Target(record, source, self._ingest.column(source))
            for record in well or heard or ready  # nobody is: the fault may be ours
            for source in record.sources
        ]


def _limits(report: WorkerReport) -> tuple[WorkerState, int, int]:
    """All of a report that holders are made of, but for what never changes in a life."""
    return report.state, report.max_loras_per_batch, report.max_total_tokens


def _capacity_blocks(record: WorkerRecord) -> int:
    """Blocks that the worker's caches can hold."""
    report = record.report
    return len(record.sources) * report.max_total_tokens // max(1, report.page_size)
