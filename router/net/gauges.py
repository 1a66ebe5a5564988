"""What the core's state looks like as metrics: gauges, and counters fed from totals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from router.core import RouterCore
from router.ids import Incarnation, SourceId, WorkerId
from router.ingest import SourceState
from router.net import metrics
from router.net.metrics import Metric
from router.reports import AdapterState, TableView


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Requests that aren't at a worker, and why; totals since the router's start."""

    waiting_for_adapter: int
    queued: int
    refused: Mapping[str, int]
    suspensions: int


class Gauges:
    """Reads the core, writes metrics; `measure` at a pace and before a scrape."""

    def __init__(self, core: RouterCore, record: Callable[..., None], *, crowd: Callable[[], Crowd]) -> None:
        """`record(metric, value, *labels)`; `crowd`: requests that aren't at a worker."""
        self._crowd = crowd
        #: state of every holding in the last copy of the table
        self._holdings: dict[tuple[WorkerId, Incarnation, str, str], AdapterState] = {}
        self._core = core
        self._record = record
        #: totals that have been told already, by metric and what they are of
        self._told: dict[tuple[str, Any], int] = {}

    def measure(self) -> None:
        """Tell everything as it is now."""
        core, ingest = self._core, self._core.ingest
        self._told = {k: v for k, v in self._told.items() if not isinstance(k[1], SourceId) or k[1] in ingest}
        self._record(metrics.INDEX, ingest.index.size_bytes)
        for worker_id, total in core.restarts.items():
            self._count(metrics.RESTARTS, worker_id, total, worker_id)
        for worker_id, record in core.workers.items():
            running = sum(self._measure_source(source) for source in record.sources)
            self._record(metrics.IN_FLIGHT, running, worker_id)
            self._record(metrics.ADAPTERS, len(record.adapters), worker_id)
            self._record(metrics.SUSPENDED, record.suspended, worker_id)
        crowd = self._crowd()
        self._record(metrics.ADAPTER_WAITING, crowd.waiting_for_adapter)
        self._record(metrics.QUEUED, crowd.queued)
        for code, total in crowd.refused.items():
            self._count(metrics.REFUSED, code, total, code)
        self._count(metrics.SUSPENSIONS, None, crowd.suspensions)
        self._count(metrics.DRIFTS, None, core.load.drifts)

    def count_loads(self, view: TableView) -> None:
        """Tell what has changed since the former copy of the table."""
        former = self._holdings
        rows = {(row.worker_id, row.incarnation, row.name, row.content_id): row for row in view.holdings}
        self._holdings = {key: row.state for key, row in rows.items()}
        for key, row in rows.items():
            if row.state is former.get(key) or row.state not in (AdapterState.LOADED, AdapterState.FAILED):
                continue
            self._record(metrics.LOADS, 1, row.worker_id, row.state.value)
            if row.state is AdapterState.LOADED:
                self._record(metrics.LOAD_TIME, row.load_s)
        lives = {(worker_id, incarnation) for worker_id, incarnation, _, _ in rows}
        for key in former.keys() - rows.keys():
            if key[:2] in lives and key[2] in view.names:
                self._record(metrics.UNLOADS, 1, key[0])

    def _measure_source(self, source: SourceId) -> int:
        """Returns its running requests."""
        ingest = self._core.ingest
        labels = (source.worker_id, str(source.dp_rank))
        stats, cursor, state = ingest.stats(source), ingest.cursor(source), ingest.state(source)
        self._record(metrics.BLOCKS, ingest.index.num_blocks(source), *labels)
        for possible in SourceState:
            self._record(metrics.STATE, state is possible, *labels, possible.value)
        self._count(metrics.EVENTS, source, stats.events, *labels)
        self._count(metrics.GAPS, source, cursor.gaps, *labels)
        self._count(metrics.DUPLICATES, source, cursor.duplicates, *labels)
        self._count(metrics.BAD, source, stats.bad, *labels)
        self._record(metrics.LAG, stats.lag_s, *labels)
        return int(self._core.load.running[ingest.column(source)])

    def _count(self, metric: Metric, of: Any, total: int, *labels: str) -> None:
        """Add what a total has grown by since it was last told."""
        self._record(metric, total - self._told.get((metric.name, of), 0), *labels)
        self._told[metric.name, of] = total
