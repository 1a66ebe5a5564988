"""A loader at work on a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from actors.adapters.entry import Wanted
from actors.adapters.loader import AdapterLoader
from actors.adapters.sources import AdapterCache
from actors.engine.client import EngineError
from actors.engine.identity import content_id
from router.ids import Incarnation, WorkerId
from router.reports import RankLoad
from tests.actors.adapters.making import make_adapter

PATIENCE_S: Final = 5.0


class FakeEngine:
    """An engine's control API: notes calls, refuses what SGLang refuses, fails or hangs where it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.loaded: dict[str, str] = {}
        self.pinned: set[str] = set()
        #: calls that fail before one succeeds, as "load name"
        self.failures: dict[str, int] = {}
        #: names whose next load succeeds, and its answer never comes
        self.lost: set[str] = set()
        #: requests that it has, and how often somebody looked
        self.running = 0
        self.num_looks = 0
        #: cleared: calls hang
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        await self._call("load", name)
        if name in self.loaded:
            raise EngineError(f"adapter {name} is loaded already")
        self.loaded[name] = content_id(Path(path))
        self.pinned |= {name} if pinned else set()
        if name in self.lost:
            self.lost.remove(name)
            raise EngineError("ServerDisconnectedError")

    async def loads(self) -> dict[int, RankLoad]:
        self.num_looks += 1
        return {0: RankLoad(running=self.running, waiting=0)}

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        await self._call("unload", name)
        if name not in self.loaded:
            raise EngineError(f"adapter {name} is not loaded")
        del self.loaded[name]

    async def _call(self, verb: str, name: str) -> None:
        call = f"{verb} {name}"
        self.calls.append(call)
        await self.goes_on.wait()
        if self.failures.get(call, 0):
            self.failures[call] -= 1
            raise EngineError("out of memory")


class Bench:
    """A loader at work on a fake engine, with adapters at hand."""

    def __init__(self, folder: Path, *, unload_s: float = 7.0) -> None:
        self.folder = folder
        self.engine = FakeEngine()
        #: every state that was told, as "name state"
        self.told: list[str] = []
        self.num_changes = 0
        self._changed = asyncio.Event()
        self.loader = AdapterLoader(
            WorkerId("w0"),
            Incarnation("i0"),
            self.engine,  # type: ignore[arg-type]  # as much of it as is used
            AdapterCache(folder / "cache", max_bytes=1 << 30),
            on_change=self._on_change,
            unload_s=unload_s,
        )

    def wanted(self, name: str, *, seed: int = 0, pinned: bool = False) -> Wanted:
        source = make_adapter(self.folder / f"{name}-{seed}", seed=seed)
        return Wanted(name=name, source=str(source), content_id=content_id(source), pinned=pinned)

    @property
    def states(self) -> dict[str, str]:
        return {row.name: row.state.value for row in self.loader.holdings}

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until a change makes `condition` true."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _on_change(self) -> None:
        self.num_changes += 1
        self.told += [line for line in (f"{n} {s}" for n, s in self.states.items()) if line not in self.told]
        self._changed.set()


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(bench.loader.run())
    try:
        yield task
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=0.1)
