"""The router's metrics, named once; a Recorder carries them to Prometheus, another to Ray.

Labels are bounded: adapters beyond the first `MAX_ADAPTERS` seen count as `other`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

MAX_ADAPTERS: Final = 100
_TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LOAD_BUCKETS_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)


class Kind(StrEnum):
    """How a metric moves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the router."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


REQUESTS = Metric("loray_requests", Kind.COUNTER, "Requests answered.", ("adapter", "worker", "status"))
TTFT = Metric("loray_ttft_seconds", Kind.HISTOGRAM, "Time to first byte of output.", ("adapter",), _TTFT_BUCKETS_S)
PREDICTED = Metric("loray_predicted_cached_tokens", Kind.COUNTER, "Cached tokens predicted.", ("adapter",))
ACTUAL = Metric("loray_cached_tokens", Kind.COUNTER, "Cached tokens reported by engines.", ("adapter",))
PROMPT = Metric("loray_prompt_tokens", Kind.COUNTER, "Prompt tokens of answered requests.", ("adapter",))
PREDICTIONS = Metric("loray_predictions", Kind.COUNTER, "Predictions by outcome: exact, over, under.", ("outcome",))
REASONS = Metric("loray_decisions", Kind.COUNTER, "Decisions by reason.", ("reason",))
RETRIES = Metric("loray_retries", Kind.COUNTER, "Requests sent again after their worker failed.", ("worker",))
IN_FLIGHT = Metric("loray_in_flight_requests", Kind.GAUGE, "Requests dispatched and not finished.", ("worker",))
BLOCKS = Metric("loray_cached_blocks", Kind.GAUGE, "Blocks held on GPU as the router knows.", ("worker", "dp_rank"))
STATE = Metric("loray_source_state", Kind.GAUGE, "1 for the state it is in, else 0.", ("worker", "dp_rank", "state"))
EVENTS = Metric("loray_events", Kind.COUNTER, "KV events applied.", ("worker", "dp_rank"))
GAPS = Metric("loray_event_gaps", Kind.COUNTER, "Gaps seen in event streams.", ("worker", "dp_rank"))
DUPLICATES = Metric("loray_event_duplicates", Kind.COUNTER, "Batches seen again.", ("worker", "dp_rank"))
BAD = Metric("loray_bad_events", Kind.COUNTER, "Events unreadable or of an unknown tier.", ("worker", "dp_rank"))
RESTARTS = Metric("loray_engine_restarts", Kind.COUNTER, "Engine lives that another followed.", ("worker",))
INDEX = Metric("loray_index_bytes", Kind.GAUGE, "Memory of the block index.")
AUDITS = Metric("loray_audits", Kind.COUNTER, "Audits: clean, dirty, inconclusive.", ("worker", "dp_rank", "verdict"))
GHOSTS = Metric("loray_audit_ghosts", Kind.GAUGE, "Blocks here, not in the worker's mirror.", ("worker", "dp_rank"))
MISSING = Metric("loray_audit_missing", Kind.GAUGE, "Blocks in the mirror, not here.", ("worker", "dp_rank"))
PROBES = Metric("loray_audit_probes", Kind.COUNTER, "Engines asked: exact, over, under.", ("outcome",))
ADAPTERS = Metric("loray_adapters_loaded", Kind.GAUGE, "Adapters that the worker's engine holds.", ("worker",))
LOADS = Metric("loray_adapter_loads", Kind.COUNTER, "Loads by outcome: loaded, failed.", ("worker", "outcome"))
UNLOADS = Metric("loray_adapter_unloads", Kind.COUNTER, "Adapters given up while still offered.", ("worker",))
LOAD_TIME = Metric("loray_adapter_load_seconds", Kind.HISTOGRAM, "Time to load, files included.", (), _LOAD_BUCKETS_S)
ADAPTER_WAIT = Metric("loray_adapter_wait_seconds", Kind.HISTOGRAM, "Wait for an adapter.", (), _LOAD_BUCKETS_S)
ADAPTER_WAITING = Metric("loray_adapter_waiting_requests", Kind.GAUGE, "Requests that wait for an adapter.")
QUEUE_WAIT = Metric(
    "loray_queue_wait_seconds", Kind.HISTOGRAM, "Wait in the router for a worker with room.", (), _LOAD_BUCKETS_S
)
QUEUED = Metric("loray_queued_requests", Kind.GAUGE, "Requests that wait in the router for a worker with room.")
REFUSED = Metric("loray_refused_requests", Kind.COUNTER, "Answered 429, by code.", ("code",))
SUSPENDED = Metric("loray_worker_suspended", Kind.GAUGE, "1 while the worker fails or stands still.", ("worker",))
SUSPENSIONS = Metric("loray_worker_suspensions", Kind.COUNTER, "Times that a worker was suspended.")
DRIFTS = Metric("loray_load_drifts", Kind.COUNTER, "Times that an engine's own count of requests differed for a while.")
LAG = Metric("loray_event_lag_seconds", Kind.GAUGE, "Age of the last batch when applied.", ("worker", "dp_rank"))

ALL: Final = (
    REQUESTS, TTFT, PREDICTED, ACTUAL, PROMPT, PREDICTIONS, REASONS, RETRIES, IN_FLIGHT, BLOCKS, STATE, EVENTS,
    GAPS, DUPLICATES, BAD, RESTARTS, INDEX, AUDITS, GHOSTS, MISSING, PROBES, ADAPTERS, LOADS, UNLOADS, LOAD_TIME,
    ADAPTER_WAIT, ADAPTER_WAITING, QUEUE_WAIT, QUEUED, REFUSED, SUSPENDED, SUSPENSIONS, DRIFTS, LAG,
)  # fmt: skip


class Recorder(Protocol):
    """Where measurements go. `labels` run parallel to `metric.labels`. Never raises, never blocks."""

    def record(self, metric: Metric, value: float, *labels: str) -> None:
        """Add to a counter, set a gauge, observe in a histogram."""


class PrometheusRecorder:
    """Keeps measurements for the /metrics endpoint."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._series: dict[str, Counter | Gauge | Histogram] = {}
        for metric in ALL:
            match metric.kind:
                case Kind.COUNTER:
                    series: Counter | Gauge | Histogram = Counter(
                        metric.name, metric.help, metric.labels, registry=self._registry
                    )
                case Kind.GAUGE:
                    series = Gauge(metric.name, metric.help, metric.labels, registry=self._registry)
                case Kind.HISTOGRAM:
                    series = Histogram(
                        metric.name, metric.help, metric.labels, registry=self._registry, buckets=metric.buckets
                    )
            self._series[metric.name] = series

    def record(self, metric: Metric, value: float, *labels: str) -> None:
        """See Recorder."""
        series = self._series[metric.name]
        child = series.labels(*labels) if labels else series
        match child:
            case Counter():
                child.inc(value)
            case Gauge():
                child.set(value)
            case Histogram():
                child.observe(value)

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


def outcome(predicted: int, actual: int) -> str:
    """Label of a prediction: what the engine reported against it."""
    return "exact" if predicted == actual else "over" if predicted > actual else "under"


class AdapterLabels:
    """Adapter names as label values, bounded."""

    def __init__(self, limit: int = MAX_ADAPTERS) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def label(self, adapter: str | None) -> str:
        """The adapter's own name, `base` for none, `other` once too many are known."""
        if adapter is None:
            return "base"
        if adapter not in self._seen:
            if len(self._seen) >= self._limit:
                return "other"
            self._seen.add(adapter)
        return adapter
