"""What the core's state looks like as metrics: gauges, and counters fed from totals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.core import RouterCore
from router.ids import SourceId
from router.ingest import SourceState
from router.net import metrics
from router.net.metrics import Metric


class Gauges:
    """Reads the core, writes metrics; `measure` at a pace and before a scrape."""

    def __init__(self, core: RouterCore, record: Callable[..., None]) -> None:
        """`record(metric, value, *labels)`."""
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
