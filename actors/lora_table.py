"""The LoRA table: the deployment's catalogue of adapters, who is to hold which, and what every engine calls them.

Plain class; deployment/cluster.py makes it a named actor that Ray restarts. Workers tell it what they hold and ask what
they shall (`tell`, `wait_wanted`); routers take copies (`wait_view`), say what requests wait for (`want`) and what they
use. A restarted table reads its catalogue again, waits a moment for the workers to tell it everything, and only then
shows itself to routers.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from actors.adapters.admission import AdapterDesk
from actors.adapters.assignments import Assignments
from actors.adapters.checks import folded, normal
from actors.adapters.entry import Assignment, Entry, Placement
from actors.adapters.placement import Place, PlacementPlan
from router.errors import AdapterRefused
from router.ids import Incarnation, WorkerId
from router.reports import AdapterState, Holding, TableVersion, TableView, WorkerFacts

log = logging.getLogger(__name__)

SETTLE_S: Final = 3.0
"""Workers tell their holdings every 2 s: after this long, a restarted table has heard from all that live."""
SILENT_S: Final = 8.0
"""A worker that tells nothing for so long holds nothing that counts."""
LOAD_WAIT_S: Final = 600.0
"""How long a call waits for workers to load or unload."""
_TICK_S: Final = 0.5
_ASK_S: Final = 1.0
"""Pace at which a call repeats its wish for an adapter."""
_DONE: Final = (AdapterState.LOADED, AdapterState.FAILED)


class LoraTable:
    """Aggregated LoRANameTable. Lives on one event loop; `version` grows with every change."""

    def __init__(self, desk: AdapterDesk) -> None:
        """`desk` reads and checks adapters, and keeps what users changed."""
        self._desk = desk
        self._plan = PlacementPlan()
        self._epoch = uuid.uuid4().hex[:12]
        self._version = 0
        #: what each worker's current life holds, and when it last said so
        self._holdings: dict[WorkerId, tuple[Incarnation, tuple[Holding, ...]]] = {}
        self._told_s: dict[WorkerId, float] = {}
        self._assignments = Assignments(self._epoch)
        #: configured adapters that can't be served, and why
        self._rejected: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._settled_s = time.monotonic() + SETTLE_S
        self._opening: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        #: one change at a time of an adapter, and of all whose names can't be told from its
        self._locks: dict[str, asyncio.Lock] = {}
        #: workers that joined before the catalogue was read
        self._facts: dict[WorkerId, WorkerFacts] = {}

    def __repr__(self) -> str:
        return f"LoraTable(version {self._version}, {len(self._plan.entries)} adapters)"

    # -- workers -------------------------------------------------------------------------------------------------

    async def tell(
        self, worker_id: WorkerId, incarnation: Incarnation, holdings: list[Holding], facts: WorkerFacts | None = None
    ) -> TableVersion:
        """All that one life of a worker holds; replaces what was told of the worker before. `facts` once it serves."""
        self._open()
        now_s = self._told_s[worker_id] = time.monotonic()
        told, before = (incarnation, tuple(holdings)), self._holdings.get(worker_id)
        joins = facts is not None and (worker_id not in self._plan.places or before is None or before[0] != incarnation)
        left = facts is None and worker_id in self._plan.places
        if before != told:
            self._holdings[worker_id] = told
        if not self._is_open:
            self._facts.pop(worker_id, None)
            if facts is not None:
                self._facts[worker_id] = facts
        elif facts is None:
            self._plan.leave(worker_id, now_s=now_s)
        elif joins:
            held = [row.name for row in holdings if row.state is AdapterState.LOADED]
            self._plan.join(worker_id, Place.of(facts), held=held, now_s=now_s)
        for row in holdings:
            if row.state in _DONE and self._is_current(row):
                self._plan.concluded(worker_id, row.name, now_s=now_s)
        if before != told or joins or left:
            self._bump()
        return TableVersion(epoch=self._epoch, version=self._version)

    async def wait_wanted(self, worker_id: WorkerId, epoch: str, revision: int, timeout_s: float) -> Assignment:
        """What a worker is to hold, as soon as it is newer than (epoch, revision), or after `timeout_s` anyway."""
        self._open()
        await self._settle()

        def newer() -> bool:
            now = self._assignments.get(worker_id)
            return (now.epoch, now.revision) != (epoch, revision)

        await self._until(newer, timeout_s)
        return self._assignments.get(worker_id)

    async def forget(self, worker_id: WorkerId) -> None:
        """The worker is gone for good."""
        self._told_s.pop(worker_id, None)
        self._plan.leave(worker_id, now_s=time.monotonic())
        self._assignments.forget(worker_id)
        if self._holdings.pop(worker_id, None) is not None:
            self._bump()

    # -- routers -------------------------------------------------------------------------------------------------

    def view(self) -> TableView:
        """The whole table."""
        rows = [
            row if self._is_wanted(row) else msgspec.structs.replace(row, state=AdapterState.UNLOADING)
            for _, told in sorted(self._holdings.items())
            for row in told[1]
        ]
        return TableView(
            epoch=self._epoch,
            version=self._version,
            names=tuple(sorted({*self._plan.entries, *self._desk.unread})),
            holdings=tuple(rows),
        )

    async def wait_view(self, epoch: str, version: int, timeout_s: float) -> bytes:
        """The table as msgpack, as soon as it is newer than (epoch, version), or after `timeout_s` anyway."""
        self._open()
        await self._settle()
        await self._until(lambda: (epoch, version) != (self._epoch, self._version), timeout_s)
        return msgspec.msgpack.encode(self.view())

    async def want(self, name: str, preferred: list[WorkerId], waiting: int, *, more: bool) -> None:
        """Requests wait for an adapter, or its holders are too busy (`more`). Repeat it while they do."""
        rows = [row for _, told in self._holdings.values() for row in told if row.name == name and self._is_wanted(row)]
        holders = self._plan.holders(name)
        failed = len(rows) >= len(holders) and all(row.state is AdapterState.FAILED for row in rows)
        if failed and holders:
            preferred = self._plan.give_up(name, holders[-1], preferred)
        self._plan.want(name, preferred, waiting=waiting, more=more or failed, now_s=time.monotonic())
        self._bump_if_reassigned()

    async def use(self, counts: Mapping[str, int]) -> None:
        """Requests that a router has sent to adapters since it last said so."""
        self._plan.use(counts, now_s=time.monotonic())

    # -- users ---------------------------------------------------------------------------------------------------

    async def load(
        self,
        name: str,
        source: str,
        *,
        placement: str | None = None,
        replicas: int = 1,
        pinned: bool = False,
        wait_s: float = LOAD_WAIT_S,
    ) -> dict[str, Any]:
        """Offer an adapter and load it where it shall be. Raises AdapterRefused, having changed nothing.

        Loading what is offered already, from the same source and with the same content, only reports.
        """
        self._open()
        await self._opened()
        name = normal(name)
        async with self._lock(name):
            entry = await self._desk.admit(
                name,
                source,
                placement=Placement(placement) if placement else None,
                replicas=replicas,
                pinned=pinned,
                offered=self._plan.entries,
            )
            await self._desk.keep(entry)
            self._put(entry)
        if entry.placement is Placement.ON_DEMAND:
            await self.want(entry.name, [], 1, more=False)
        return await self._report(entry.name, wait_s, ask=True)

    async def unload(self, name: str, *, wait_s: float = LOAD_WAIT_S) -> dict[str, Any]:
        """Offer the adapter no more; requests that run on it finish. Raises AdapterRefused if it isn't offered."""
        await self._opened()
        name = normal(name)
        async with self._lock(name):
            self._entry(name)
            await self._desk.remove(name)
            self._plan.drop(name, now_s=time.monotonic())
            self._bump()
        held = self._held_by(name)
        await self._until(lambda: not self._held_by(name) or name in self._plan.entries, wait_s)  # or offered again
        left = self._held_by(name)
        return {
            "name": name,
            "success": not left,
            "results": {w: {"state": left[w].state.value if w in left else "unloaded"} for w in sorted(held)},
        }

    async def reload(self, name: str, *, wait_s: float = LOAD_WAIT_S) -> dict[str, Any]:
        """Read the adapter's source again; other content is loaded in place of the former. Raises AdapterRefused."""
        await self._opened()
        name = normal(name)
        async with self._lock(name):
            former = self._entry(name)
            entry = await self._desk.read_again(former)
            await self._desk.keep(entry)
            self._put(entry)
        report = await self._report(name, wait_s)
        return {**report, "changed": entry.content_id != former.content_id}

    async def pin(self, name: str, *, pinned: bool) -> dict[str, Any]:
        """Keep it where it is loaded, or no longer. Raises AdapterRefused."""
        await self._opened()
        name = normal(name)
        async with self._lock(name):
            entry = msgspec.structs.replace(self._entry(name), pinned=pinned)
            await self._desk.keep(entry)
            self._put(entry)
        return await self._report(name, 0.0)

    async def status(self) -> dict[str, Any]:
        """For `status`: JSON values."""
        self._open()
        view = self.view()
        return {
            "epoch": view.epoch,
            "version": view.version,
            "adapters": list(view.names),
            "catalogue": [msgspec.to_builtins(entry) for _, entry in sorted(self._plan.entries.items())],
            "rejected": dict(self._rejected),
            "error": self._opening_error(),
            "holdings": [msgspec.to_builtins(row) for row in view.holdings],
            "wanted": {worker_id: sorted(place.desired) for worker_id, place in self._plan.places.items()},
            "unread": len(self._desk.unread),
            "waiting": self._plan.waiting,
            "evictions": self._plan.num_evictions,
        }

    async def close(self) -> None:
        """End what runs by itself."""
        for task in (self._opening, self._ticking):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    # -- inside --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Start what runs by itself; the first call does."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._read_catalogue())
            self._ticking = asyncio.ensure_future(self._tick())

    @property
    def _is_open(self) -> bool:
        return self._opening is not None and self._opening.done()

    def _opening_error(self) -> str:
        """Why the catalogue can't be read at all; empty for no reason."""
        failed = self._opening.exception() if self._opening is not None and self._is_open else None
        return str(failed) if failed is not None else ""

    async def _opened(self) -> None:
        self._open()
        assert self._opening is not None
        await asyncio.shield(self._opening)

    async def _read_catalogue(self) -> None:
        """Offer what is configured and what users added, one after the other."""
        async for name, entry, error in self._desk.open():
            if entry is None:
                self._rejected[name] = error
                log.error("adapter %s can't be served: %s", name, error)
                self._bump()
            else:
                self._put(entry)
        for worker_id, facts in self._facts.items():
            held = [row.name for row in self._holdings[worker_id][1] if row.state is AdapterState.LOADED]
            self._plan.join(worker_id, Place.of(facts), held=held, now_s=time.monotonic())
        self._bump()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            for worker_id, told_s in list(self._told_s.items()):
                if now_s - told_s > SILENT_S:
                    log.warning("worker %s tells nothing for %.0f s: forgotten", worker_id, now_s - told_s)
                    await self.forget(worker_id)
            self._plan.settle(now_s=now_s)
            self._bump_if_reassigned()

    async def _settle(self) -> None:
        """Until what is shown is whole: half a catalogue would have workers unload the other half."""
        await self._opened()
        await asyncio.sleep(max(0.0, self._settled_s - time.monotonic()))

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for changes until `condition` holds; False if it doesn't within `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while not condition():
            changed = self._changed
            try:
                async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                    await changed.wait()
            except TimeoutError:
                return condition()
        return True

    async def _report(self, name: str, wait_s: float, *, ask: bool = False) -> dict[str, Any]:
        """What every worker that is to hold `name` has made of it, once all have, or after `wait_s`.

        `ask`: as a request that waits for it, so that somebody gets it.
        """

        def concluded() -> bool:
            holders, rows = self._plan.holders(name), self._rows(name)
            if not holders and (name not in self._plan.entries or not ask):
                return True
            return bool(holders) and all(w in rows and rows[w].state in _DONE for w in holders)

        until_s = time.monotonic() + wait_s
        while not concluded() and (left_s := until_s - time.monotonic()) > 0:
            if ask and not self._plan.holders(name):
                self._plan.want(name, (), waiting=1, more=False, now_s=time.monotonic())
                self._bump_if_reassigned()
            await self._until(concluded, min(left_s, _ASK_S))
        entry, rows = self._plan.entries.get(name), self._rows(name)
        results = {}
        for worker_id in sorted(self._plan.holders(name)):
            row = rows.get(worker_id)
            results[worker_id] = (
                {"state": "pending"}
                if row is None
                else {"state": row.state.value, "load_s": row.load_s, **({"error": row.error} if row.error else {})}
            )
        return {
            "name": name,
            "content_id": entry.content_id if entry else "",
            "success": any(one["state"] == "loaded" for one in results.values()),
            "results": results,
        }

    def _put(self, entry: Entry) -> None:
        former = self._plan.entries.get(entry.name)
        if former is not None and former.content_id != entry.content_id:
            self._plan.reopen(entry.name)
        self._rejected.pop(entry.name, None)
        self._plan.put(entry, now_s=time.monotonic())
        self._bump()

    def _entry(self, name: str) -> Entry:
        if name not in self._plan.entries:
            listed = ", ".join(sorted(self._plan.entries)) or "none"
            raise AdapterRefused(f"adapter {name!r} isn't offered; offered: {listed}")
        return self._plan.entries[name]

    def _is_current(self, row: Holding) -> bool:
        entry = self._plan.entries.get(row.name)
        return entry is not None and entry.content_id == row.content_id

    def _is_wanted(self, row: Holding) -> bool:
        place = self._plan.places.get(row.worker_id)
        return self._is_current(row) and place is not None and row.name in place.desired

    def _rows(self, name: str) -> dict[WorkerId, Holding]:
        """What holders say of the adapter's present content."""
        return {
            row.worker_id: row
            for _, told in self._holdings.values()
            for row in told
            if row.name == name and self._is_current(row)
        }

    def _held_by(self, name: str) -> dict[WorkerId, Holding]:
        return {w: row for w, (_, told) in self._holdings.items() for row in told if row.name == name}

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(folded(name), asyncio.Lock())

    def _bump_if_reassigned(self) -> None:
        if self._assignments.update(self._plan):
            self._bump()

    def _bump(self) -> None:
        self._assignments.update(self._plan)
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
