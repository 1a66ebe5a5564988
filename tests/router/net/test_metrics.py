"""Claims of router/net/metrics.py: bounded series, whatever names come along."""

from __future__ import annotations

from router.net import metrics
from router.net.metrics import ALL, AdapterLabels, Kind, PrometheusRecorder


def test_five_thousand_names_make_a_bounded_number_of_series() -> None:
    labels, recorder = AdapterLabels(), PrometheusRecorder()
    for i in range(5000):
        recorder.record(metrics.PROMPT, 1, labels.label(f"adapter-{i}"))

    lines = [line for line in recorder.text().decode().splitlines() if line.startswith("loray_prompt_tokens_total{")]
    assert len(lines) == metrics.MAX_ADAPTERS + 1
    assert f'loray_prompt_tokens_total{{adapter="other"}} {5000.0 - metrics.MAX_ADAPTERS}' in lines


def test_the_base_model_has_a_label_of_its_own() -> None:
    assert AdapterLabels().label(None) == "base"


def test_every_metric_can_be_recorded_and_is_exported() -> None:
    recorder = PrometheusRecorder()
    for metric in ALL:
        recorder.record(metric, 2, *("x" for _ in metric.labels))

    text = recorder.text().decode()
    for metric in ALL:
        assert f"# HELP {metric.name}" in text
        assert metric.kind is not Kind.HISTOGRAM or f"{metric.name}_bucket" in text
