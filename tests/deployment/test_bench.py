"""The benchmarks run and print what their readers expect; no figure is asserted."""

from __future__ import annotations

import json

import pytest

from deployment.cli import main


def _run(what: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, dict[str, float]]]:
    assert main(["bench", what, "--quick", "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_index_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = _run("index", capsys)

    for figures in (found, found["plain"]):
        assert set(figures["ingest"]) == {"1", "16", "64"}
        assert {length: set(row) for length, row in figures["match"].items()} == {
            length: {"p50_us", "p99_us"} for length in ("64", "256", "1024")
        }
        assert figures["bytes_per_block"]


def test_route_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = _run("route", capsys)

    for figures in (found, found["plain"], found["nobody_holds_it"]):
        assert all(set(figures[length]) == {"p50_us", "p99_us"} for length in ("64", "256", "1024"))


def test_ingress_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = _run("ingress", capsys)

    for figures in (found, found["plain"]):
        assert set(figures["added_ms"]) == {"p50", "p99"}
        assert figures["sse_events_per_s"]


def test_mirror_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = _run("mirror", capsys)

    assert set(found["mirror"]) == {"us_per_block", "blocks_per_event", "core_share_at_50k_blocks_per_s"}
    assert set(found["snapshot"]) == {"blocks", "seconds", "longest_stall_ms"}
