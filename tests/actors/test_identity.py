"""Claims of actors/engine/identity.py: an adapter is its name and its files' content."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.engine.identity import AdapterFilesError, content_id, lora_id


def _adapter(folder: Path, *, weights: bytes = b"w", config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_same_files_elsewhere_are_the_same_content(tmp_path: Path) -> None:
    one, two = _adapter(tmp_path / "one"), _adapter(tmp_path / "two")
    (two / "README.md").write_text("not part of an adapter")

    assert content_id(one) == content_id(two)


def test_other_weights_or_config_are_other_content(tmp_path: Path) -> None:
    adapters = [
        _adapter(tmp_path / "a"),
        _adapter(tmp_path / "b", weights=b"v"),
        _adapter(tmp_path / "c", config='{"r": 1}'),
        _adapter(tmp_path / "d", weights=b""),
    ]

    assert len({content_id(adapter) for adapter in adapters}) == len(adapters)


def test_lora_id_depends_on_name_and_content_and_nothing_else() -> None:
    ids = {lora_id("a", "1"), lora_id("a", "2"), lora_id("b", "1")}

    assert len(ids) == 3
    assert lora_id("a", "1") in ids
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("adapter_config.json", "has no adapter_config"), ("adapter_model.safetensors", "has no weights")],
)
def test_what_is_missing_is_named(tmp_path: Path, missing: str, message: str) -> None:
    adapter = _adapter(tmp_path / "a")
    (adapter / missing).unlink()

    with pytest.raises(AdapterFilesError, match=message):
        content_id(adapter)
