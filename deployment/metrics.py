"""The router's metrics on Ray's own metrics endpoint, where the dashboard and its Prometheus find them."""

from __future__ import annotations

from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from router.net.metrics import ALL, Kind, Metric


class RayRecorder:
    """A Recorder; made inside the actor's process."""

    def __init__(self, **tags: str) -> None:
        """`tags` go with every series, such as the router's id."""
        self._tags = tags
        self._series: dict[str, Any] = {}
        for metric in ALL:
            keys = (*metric.labels, *tags)
            match metric.kind:
                case Kind.COUNTER:
                    series: Any = Counter(metric.name, metric.help, keys)
                case Kind.GAUGE:
                    series = Gauge(metric.name, metric.help, keys)
                case Kind.HISTOGRAM:
                    series = Histogram(metric.name, metric.help, list(metric.buckets), keys)
            self._series[metric.name] = series

    def record(self, metric: Metric, value: float, *labels: str) -> None:
        """See Recorder."""
        tags = {**dict(zip(metric.labels, labels, strict=True)), **self._tags}
        series = self._series[metric.name]
        match metric.kind:
            case Kind.COUNTER:
                if value > 0:  # Ray refuses to add nothing
                    series.inc(value, tags)
            case Kind.GAUGE:
                series.set(value, tags)
            case Kind.HISTOGRAM:
                series.observe(value, tags)
