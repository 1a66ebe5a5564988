"""Makes one engine hold what it is to hold: fetches, loads, unloads, and tries again what failed.

One step after the other, as the engine itself does them. What is held, and what became of every wish, is `holdings`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from actors.adapters.entry import Wanted
from actors.adapters.sources import AdapterCache, SourceError
from actors.engine.client import EngineClient, EngineError
from actors.engine.identity import lora_id
from router.ids import Incarnation, WorkerId
from router.reports import AdapterState, Holding

log = logging.getLogger(__name__)

UNLOAD_S: Final = 120.0
"""An engine that unloads for so long and has no requests is stuck. It lets the adapter's last request end first."""
MAX_UNLOAD_S: Final = 3600.0
"""No answer is written for longer (`router.request_timeout_s`), so whatever else an engine does, it has lost count."""
_BACKOFF_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)


class AdapterLoader:
    """Of one engine life. `run` until cancelled."""

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: Incarnation,
        client: EngineClient,
        cache: AdapterCache,
        *,
        on_change: Callable[[], None],
        unload_s: float = UNLOAD_S,
    ) -> None:
        """`on_change` is called after every change of `holdings`."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._client = client
        self._cache = cache
        self._on_change = on_change
        self._unload_s = unload_s
        self._wanted: dict[str, Wanted] = {}
        self._rows: dict[str, Holding] = {}
        #: by (name, content id): failures in a row, and when to try again
        self._failures: dict[tuple[str, str], tuple[int, float]] = {}
        #: adapters that a load has failed for, and that the engine may hold all the same: its answer can get lost
        self._unsure: set[str] = set()
        self._wake = asyncio.Event()

    @property
    def holdings(self) -> list[Holding]:
        """A row for everything held or tried."""
        return list(self._rows.values())

    def assign(self, wanted: Sequence[Wanted]) -> None:
        """What the engine is to hold from now on."""
        self._wanted = {one.name: one for one in wanted}
        for name, row in list(self._rows.items()):
            if row.state is AdapterState.FAILED and name not in self._wanted:
                self._forget(name)
        self._wake.set()

    async def run(self) -> None:
        """Converge, whenever there is something to do. Raises TimeoutError if the engine is stuck."""
        while True:
            self._wake.clear()
            if await self._step():
                continue
            times = [at_s for key, (_, at_s) in self._failures.items() if self._is_wanted(*key)]
            pause_s = max(0.0, min(times, default=time.monotonic() + 3600.0) - time.monotonic())
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _step(self) -> bool:
        """Do the next thing; False if there is none."""
        for row in self._rows.values():
            if row.state is AdapterState.LOADED and not self._is_wanted(row.name, row.content_id):
                await self._unload(row)
                return True
        now_s = time.monotonic()
        for name in [name for name in self._unsure if self._is_due(name, now_s)]:
            self._unsure.discard(name)
            with contextlib.suppress(EngineError):  # it says that it doesn't hold it
                await self._client.unload_adapter(name, timeout_s=self._unload_s)
        for one in self._wanted.values():
            held = self._rows.get(one.name)
            if held is not None and (held.content_id, held.state) == (one.content_id, AdapterState.LOADED):
                continue
            if self._failures.get((one.name, one.content_id), (0, 0.0))[1] <= now_s:
                await self._load(one)
                return True
        return False

    async def _load(self, one: Wanted) -> None:
        started_s = time.monotonic()
        self._say(one, AdapterState.LOADING)
        try:
            folder = await asyncio.to_thread(self._cache.fetch, one.source, one.content_id)
            await self._client.load_adapter(one.name, str(folder), pinned=one.pinned)
        except (SourceError, EngineError) as exc:
            if isinstance(exc, EngineError):
                self._unsure.add(one.name)
            if one.name not in self._wanted:
                self._forget(one.name)
                return
            key = (one.name, one.content_id)
            count = self._failures.get(key, (0, 0.0))[0] + 1
            self._failures[key] = (count, time.monotonic() + _BACKOFF_S[min(count, len(_BACKOFF_S)) - 1])
            log.warning("worker %s: adapter %s can't be loaded (time %d): %s", self._worker_id, one.name, count, exc)
            self._say(one, AdapterState.FAILED, error=str(exc))
            return
        self._failures.pop((one.name, one.content_id), None)
        self._say(one, AdapterState.LOADED, load_s=time.monotonic() - started_s)

    async def _unload(self, row: Holding) -> None:
        self._rows[row.name] = msgspec.structs.replace(row, state=AdapterState.UNLOADING)
        self._on_change()
        unloading = asyncio.ensure_future(self._client.unload_adapter(row.name, timeout_s=MAX_UNLOAD_S))
        try:
            while not (await asyncio.wait({unloading}, timeout=self._unload_s))[0]:
                if not await self._is_busy():
                    raise TimeoutError(f"the engine has no requests and doesn't unload adapter {row.name}")
            await unloading
        except EngineError as exc:
            raise TimeoutError(f"the engine doesn't unload adapter {row.name}: {exc}") from exc
        finally:
            unloading.cancel()
        self._forget(row.name)

    async def _is_busy(self) -> bool:
        """Whether the engine has requests, as far as it says."""
        try:
            loads = await self._client.loads()
        except EngineError:
            return False
        return any(load.running + load.waiting for load in loads.values())

    def _forget(self, name: str) -> None:
        self._rows.pop(name, None)
        self._failures = {key: failure for key, failure in self._failures.items() if self._is_wanted(*key)}
        self._on_change()

    def _is_due(self, name: str, now_s: float) -> bool:
        """Whether a failed load is to be tried again, or is to be cleaned up after."""
        wanted = self._wanted.get(name)
        return wanted is None or self._failures.get((name, wanted.content_id), (0, 0.0))[1] <= now_s

    def _is_wanted(self, name: str, content_id: str) -> bool:
        return name in self._wanted and self._wanted[name].content_id == content_id

    def _say(self, one: Wanted, state: AdapterState, *, error: str = "", load_s: float = 0.0) -> None:
        self._rows[one.name] = Holding(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            lora_id=lora_id(one.name, one.content_id),
            name=one.name,
            content_id=one.content_id,
            state=state,
            error=error,
            load_s=round(load_s, 3),
        )
        self._on_change()
