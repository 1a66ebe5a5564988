"""`python -m deployment simulate`: what it answers, and what it says of fleets that are too small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployment.cli import main
from deployment.simulate import fleet


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four calls at once, a page and 2,000 tokens of output each."""
    calls = [{"at_s": 0, "pages": [i], "input_tokens": 600, "output_tokens": 2000} for i in range(1, 5)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, calls)))
    return path


def run(trace: Path, *arguments: str) -> int:
    return main(["simulate", str(trace), "--kv-tokens", "3000", *arguments])  # one after the other


def test_it_says_how_many_workers_are_enough(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, "--workers", "1,4", "--target-ms", "1000", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workers_needed"] == 4
    assert [row["workers"] for row in found["runs"]] == [1, 4]
    assert run(trace, "--workers", "1", "--target-ms", "1000") == 1
    assert "none of [1] workers is enough" in capsys.readouterr().out


def test_a_size_that_serves_nothing_takes_no_result_from_the_others(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_MAX_VIRTUAL_S", 40.0)
    assert run(trace, "--workers", "1,4", "--target-ms", "1000", "--json") == 0
    out, err = capsys.readouterr()
    assert [row["workers"] for row in json.loads(out)["runs"]] == [4]
    assert "1 workers under ours:" in err
    assert "far too small" in err
    assert run(trace, "--workers", "1") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--workers", "0"), "--workers must be numbers from 1 to 1024"),
        (("--policy", "best"), "no policy best; there are ours"),
        (("--profile", "abacus"), "no profile 'abacus'"),
    ],
    ids=str,
)
def test_what_it_cannot_do_it_says(
    arguments: tuple[str, ...], says: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, *arguments) == 2
    assert says in capsys.readouterr().err
