"""Claims of actors/adapters/catalogue.py: what is written is read back, and a crash leaves the former file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.adapters.catalogue import CatalogueFile, Changes
from actors.adapters.entry import Entry, Placement

ENTRY = Entry(name="ä:v2", source="hf://org/repo", placement=Placement.ON_DEMAND, content_id="c1", pinned=True)
CHANGES = Changes(entries={ENTRY.name: ENTRY}, removed=["gone"], run_id="r", read={"x": ENTRY})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = CatalogueFile(tmp_path / "new" / "folder" / "adapters.json")

    file.write(CHANGES)

    assert file.read() == CHANGES


def test_there_is_nothing_before_the_first_write(tmp_path: Path) -> None:
    assert CatalogueFile(tmp_path / "adapters.json").read() == Changes()


def test_a_write_replaces_the_former_and_leaves_one_file(tmp_path: Path) -> None:
    file = CatalogueFile(tmp_path / "adapters.json")
    file.write(Changes(removed=["a much longer list"] * 50))

    file.write(CHANGES)

    assert file.read() == CHANGES
    assert os.listdir(tmp_path) == ["adapters.json"]


def test_a_write_that_fails_keeps_the_former_and_leaves_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    file = CatalogueFile(tmp_path / "adapters.json")
    file.write(CHANGES)
    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(OSError, match="No space left"):
        file.write(Changes())

    assert file.read() == CHANGES
    assert os.listdir(tmp_path) == ["adapters.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"entries": {"a": {}}}', '{"removed": ["a"'])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "adapters.json"
    path.write_text(content)

    with pytest.raises(ValueError, match=r"adapters\.json is no catalogue of adapters"):
        CatalogueFile(path).read()


def test_fields_of_a_later_version_are_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "adapters.json"
    path.write_text('{"removed": ["a"], "from_the_future": 1}')

    assert CatalogueFile(path).read() == Changes(removed=["a"])


def test_without_a_path_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = CatalogueFile(None)

    file.write(CHANGES)

    assert file.read() == Changes()
    assert os.listdir(tmp_path) == []
