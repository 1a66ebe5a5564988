"""What an adapter is: the content of its files. Same files, same id, on every worker and after every reload.

Used inside the engine (by the plugin) and outside (by workers and the table); the two must agree.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final
from uuid import NAMESPACE_URL, uuid5

from router.ids import LoraId

CONFIG_FILE: Final = "adapter_config.json"
WEIGHT_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")
_READ_BYTES: Final = 1 << 20


class AdapterFilesError(ValueError):
    """The folder isn't a PEFT adapter; the message says what is missing."""


def adapter_files(path: Path) -> list[Path]:
    """The files that make up the adapter, in a fixed order. Raises AdapterFilesError."""
    if not path.is_dir():
        raise AdapterFilesError(f"adapter folder {path} does not exist")
    config = path / CONFIG_FILE
    weights = [path / name for name in WEIGHT_FILES if (path / name).is_file()]
    if not config.is_file():
        raise AdapterFilesError(f"adapter folder {path} has no {CONFIG_FILE}")
    if not weights:
        raise AdapterFilesError(f"adapter folder {path} has no weights ({' or '.join(WEIGHT_FILES)})")
    return [config, *weights[:1]]


def content_id(path: Path) -> str:
    """SHA-256 over names, sizes and bytes of the adapter's files, as 64 hex characters. Raises AdapterFilesError."""
    digest = hashlib.sha256()
    for file in adapter_files(path):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_READ_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def lora_id(name: str, content: str) -> LoraId:
    """The id that SGLang appends to extra_key: changes exactly when name or content do. 32 hex characters."""
    return LoraId(uuid5(NAMESPACE_URL, f"{name}\0{content}").hex)
