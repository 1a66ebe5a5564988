"""The catalogue on disk: what was added, changed or removed at run time, beside what the configuration says."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from actors.adapters.entry import Entry


class Changes(msgspec.Struct, kw_only=True):
    """Everything that a deployment's users changed. Configured adapters are in it only if they were."""

    entries: dict[str, Entry] = {}
    removed: list[str] = []
    """Configured adapters that were unloaded."""
    run_id: str = ""
    read: dict[str, Entry] = {}
    """Configured adapters as deployment `run_id` has read them: a restarted table needn't again."""


class CatalogueFile:
    """One file, replaced whole: a crash leaves the former one."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: nothing is kept."""
        self._path = path

    def read(self) -> Changes:
        """What was last written; nothing before the first time. Raises ValueError if the file isn't ours."""
        if self._path is None or not self._path.exists():
            return Changes()
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Changes)
        except msgspec.MsgspecError as exc:
            raise ValueError(
                f"{self._path} is no catalogue of adapters ({exc}); move it away to start without"
            ) from exc

    def write(self, changes: Changes) -> None:
        """Keep `changes`. Raises OSError, having kept the former ones."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(msgspec.json.encode(changes))
                stream.flush()
                os.fsync(stream.fileno())
            Path(scratch).replace(self._path)
        except OSError:
            Path(scratch).unlink(missing_ok=True)
            raise
