"""`python -m deployment decisions --replay`: 0 where all is decided alike, 1 where not, 2 for no log."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from deployment.cli import main
from router.choice import LoggedDecision
from router.net.decision_log import LogHead
from tests.router.decision_history import History

WRONG = (2, 5)
"""Decisions, of those with a choice, that are changed."""


def write(path: Path, head: LogHead, log: list[LoggedDecision]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (head, *log)))


@pytest.fixture
def history() -> History:
    history = History(11)
    history.go_on(120)
    return history


@pytest.fixture
def good(history: History, tmp_path: Path) -> Path:
    """A log as it was decided."""
    path = tmp_path / "good.log"
    write(path, LogHead(router="r7", seed=history.core.seed), history.core.decisions())
    return path


@pytest.fixture
def bad(history: History, tmp_path: Path) -> tuple[Path, list[int]]:
    """A log with decisions that nobody would make, and their numbers."""
    log = history.core.decisions()
    numbers = [entry.number for entry in log if len(entry.candidates) > 1]
    numbers = [numbers[n] for n in WRONG]
    for n in numbers:
        log[n] = msgspec.structs.replace(log[n], chosen=(log[n].chosen + 1) % len(log[n].candidates))
    write(tmp_path / "bad.log", LogHead(router="r7", seed=history.core.seed), log)
    return tmp_path / "bad.log", numbers


def test_a_log_that_would_be_decided_alike(good: Path, history: History, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decisions", "--replay", str(good)]) == 0
    num_decisions = len(history.core.decisions())
    assert num_decisions > 20
    said = capsys.readouterr().out.strip()
    assert said == f"{num_decisions} decisions of router r7: 0 would be others now"


def test_a_log_with_others_names_them(bad: tuple[Path, list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    path, numbers = bad
    assert main(["decisions", "--replay", str(path)]) == 1
    assert capsys.readouterr().out.strip().endswith(f" decisions of router r7: 2 would be others now {numbers}")


def test_both_as_json(good: Path, bad: tuple[Path, list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    statuses = [main(["decisions", "--replay", str(path), "--json"]) for path in (good, bad[0])]
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert statuses == [0, 1]
    assert (first["others"], second["others"]) == ([], bad[1])
    assert first["decisions"] == second["decisions"] > 20


def test_a_log_that_is_still_written_is_read_as_far_as_it_goes(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good.write_bytes(good.read_bytes()[:-5])
    assert main(["decisions", "--replay", str(good), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["others"] == []


def test_what_is_no_log_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.write_text("not a log\n")
    assert main(["decisions", "--replay", str(other)]) == 2
    assert main(["decisions", "--replay", str(tmp_path / "none")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {other} is not a decision log: ")
    assert second.startswith("error: ")
    assert str(tmp_path / "none") in second
