"""The desk: what is let into the catalogue. Reads and checks adapters, and keeps on disk what users changed.

Everything that blocks runs in threads. Knows nothing of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from actors.adapters.catalogue import CatalogueFile, Changes
from actors.adapters.checks import (
    AdapterRejectedError,
    BaseModel,
    check_adapter,
    check_name,
    normal,
    read_base_model,
)
from actors.adapters.entry import AdapterConfig, Entry, Placement
from actors.adapters.sources import AdapterCache, SourceError, check_allowed
from router.errors import AdapterRefused

log = logging.getLogger(__name__)


class DeskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a desk is made with."""

    served_name: str
    model_path: str
    configured: dict[str, AdapterConfig]
    default_placement: Placement
    max_rank: int
    target_modules: tuple[str, ...]
    roots: tuple[str, ...] = ()
    """Where adapters may be loaded from at run time; configured ones may be anywhere."""
    cache_dir: str
    cache_gb: float
    state_file: str | None = None
    run_id: str = ""
    """Of the deployment's present run: what the file says of configured adapters holds for it only."""
    fixed: bool = False
    """Whether engines can't load at run time (dp_size above 1): the catalogue is what is configured."""


_MISSING: Final = Changes()


class AdapterDesk:
    """Lives on the table's loop."""

    def __init__(self, settings: DeskSettings) -> None:
        configured = {normal(name): one for name, one in settings.configured.items()}
        settings = msgspec.structs.replace(settings, configured=configured)
        self._settings = settings
        #: one change of the file at a time
        self._writing = asyncio.Lock()
        self._cache = AdapterCache(Path(settings.cache_dir).expanduser(), max_bytes=int(settings.cache_gb * 1e9))
        self._file = CatalogueFile(Path(settings.state_file).expanduser() if settings.state_file else None)
        self._changes = _MISSING
        self._base: BaseModel | None = None
        #: configured or kept adapters that haven't been read yet
        self.unread: set[str] = set(settings.configured)

    async def open(self) -> AsyncIterator[tuple[str, Entry | None, str]]:
        """Read the catalogue: (name, its entry, "") or (name, None, why it can't be served)."""
        self._changes = await asyncio.to_thread(self._file.read)
        self._base = await asyncio.to_thread(self._read_base)
        read: dict[str, Entry] = {}
        for name, kept in self._changes.entries.items():
            self.unread.discard(name)
            yield name, kept, ""
        for name, config in self._settings.configured.items():
            if name not in self.unread:
                continue
            if name in self._changes.removed:
                self.unread.discard(name)
                continue
            try:
                entry = await self._read_configured(name, config)
            except (AdapterRejectedError, SourceError) as exc:
                self.unread.discard(name)
                yield name, None, str(exc)
                continue
            self.unread.discard(name)
            read[name] = entry
            yield name, entry, ""
        if read != self._changes.read or self._changes.run_id != self._settings.run_id:
            with contextlib.suppress(AdapterRefused):  # then a restart reads them again
                await self._write(msgspec.structs.replace(self._changes, read=read, run_id=self._settings.run_id))

    async def admit(
        self,
        name: str,
        source: str,
        *,
        placement: Placement | None,
        replicas: int,
        pinned: bool,
        offered: Mapping[str, Entry],
    ) -> Entry:
        """An entry for an adapter that a user wants loaded. Raises AdapterRefused."""
        if self._settings.fixed:
            raise AdapterRefused("engines with workers.dp_size above 1 can't load adapters at run time; configure them")
        try:
            name = check_name(name, served_name=self._settings.served_name, taken=offered)
            check_allowed(source, self._settings.roots)
            wished = Entry(
                name=name,
                source=source,
                placement=placement or self._settings.default_placement,
                content_id="",
                replicas=replicas,
                pinned=pinned,
            )
            entry = await asyncio.to_thread(self._read, wished)
        except (AdapterRejectedError, SourceError) as exc:
            raise AdapterRefused(str(exc)) from exc
        known = offered.get(name)
        if known is not None and (known.source, known.content_id) != (entry.source, entry.content_id):
            raise AdapterRefused(
                f"adapter {name!r} is offered already, from {known.source} with content {known.content_id[:12]}; "
                "reload it if its files have changed, or unload it first"
            )
        return known or entry

    async def read_again(self, entry: Entry) -> Entry:
        """The entry with what its source holds now. Raises AdapterRefused."""
        if self._settings.fixed:
            raise AdapterRefused("engines with workers.dp_size above 1 can't reload adapters; start them anew")
        try:
            return await asyncio.to_thread(self._read, entry)
        except (AdapterRejectedError, SourceError) as exc:
            raise AdapterRefused(str(exc)) from exc

    async def keep(self, entry: Entry) -> None:
        """Make an entry durable."""
        async with self._writing:
            removed = [name for name in self._changes.removed if name != entry.name]
            entries = {**self._changes.entries, entry.name: entry}
            await self._write(msgspec.structs.replace(self._changes, entries=entries, removed=removed))

    async def remove(self, name: str) -> None:
        """Make its removal durable. Raises AdapterRefused where nothing can be removed."""
        if self._settings.fixed:
            raise AdapterRefused("engines with workers.dp_size above 1 can't unload adapters; configure fewer")
        async with self._writing:
            entries = {other: entry for other, entry in self._changes.entries.items() if other != name}
            removed = [*self._changes.removed, name] if name in self._settings.configured else self._changes.removed
            await self._write(msgspec.structs.replace(self._changes, entries=entries, removed=removed))

    async def _write(self, changes: Changes) -> None:
        try:
            await asyncio.to_thread(self._file.write, changes)
        except OSError as exc:
            raise AdapterRefused(f"the catalogue can't be kept on disk: {exc}") from exc
        self._changes = changes

    async def _read_configured(self, name: str, config: AdapterConfig) -> Entry:
        known = self._known(name, config)
        if known is not None:
            return known
        return await asyncio.to_thread(self._read, self._configured(name, config))

    def _known(self, name: str, config: AdapterConfig) -> Entry | None:
        """As this run has read it before."""
        entry = self._changes.read.get(name) if self._changes.run_id == self._settings.run_id else None
        wished = self._configured(name, config)
        return (
            entry
            if entry is not None and msgspec.structs.replace(entry, content_id="", size_bytes=0) == wished
            else None
        )

    def _configured(self, name: str, config: AdapterConfig) -> Entry:
        return Entry(
            name=check_name(name, served_name=self._settings.served_name),
            source=config.path,
            placement=config.placement or self._settings.default_placement,
            content_id="",
            replicas=config.replicas,
            max_replicas=config.max_replicas,
            pinned=config.pinned,
        )

    def _read(self, entry: Entry) -> Entry:
        folder = self._cache.fetch(entry.source)
        settings = self._settings
        check_adapter(folder, base=self._base, max_rank=settings.max_rank, target_modules=settings.target_modules)
        size_bytes = sum(file.stat().st_size for file in folder.iterdir())
        return msgspec.structs.replace(entry, content_id=folder.name, size_bytes=size_bytes)

    def _read_base(self) -> BaseModel | None:
        """None where the model is no folder here: engines then say what doesn't fit."""
        file = Path(self._settings.model_path).expanduser() / "config.json"
        try:
            return read_base_model(file) if file.is_file() else None
        except (OSError, ValueError) as exc:
            log.warning("adapters aren't compared with the base model: %s", exc)
            return None
