"""A LoRA table over adapters in a folder, and fake workers that follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec

from actors.adapters.entry import AdapterConfig, Assignment, Wanted
from actors.engine.identity import lora_id
from actors.lora_table import LoraTable
from router.ids import Incarnation, WorkerId
from router.reports import AdapterState, Holding, TableView, WorkerFacts
from tests.actors.adapters.making import make_desk

T = TypeVar("T")
PATIENCE_S: Final = 5.0


class FakeWorker:
    """A worker as the table sees it: takes its assignment and tells what it holds. Loading is done at once."""

    def __init__(self, table: LoraTable, worker_id: str = "w0", *, capacity: int = 8, slots: int = 8) -> None:
        self.table = table
        self.worker_id = WorkerId(worker_id)
        self.facts: WorkerFacts | None = WorkerFacts(capacity=capacity, slots=slots)
        #: names whose loading fails here
        self.failing: set[str] = set()
        self.assignment = Assignment(epoch="", revision=0)
        self.held: dict[str, Holding] = {}
        self._num_lives = 0
        self.incarnation = Incarnation(f"{worker_id}-0")

    @property
    def wanted(self) -> list[str]:
        """Names that it was last asked to hold."""
        return sorted(one.name for one in self.assignment.wanted)

    async def tell(self, *rows: Holding) -> None:
        """Tell `rows`, or all that is held."""
        await self.table.tell(self.worker_id, self.incarnation, list(rows or self.held.values()), self.facts)

    async def ask(self, timeout_s: float = 0.0) -> list[str]:
        """Ask what to hold; returns the names."""
        known = self.assignment
        self.assignment = await self.table.wait_wanted(self.worker_id, known.epoch, known.revision, timeout_s)
        return self.wanted

    async def step(self, timeout_s: float = 0.0) -> None:
        """Ask what to hold, hold it, and tell so."""
        await self.ask(timeout_s)
        if self.assignment.revision:
            self.hold(self.assignment.wanted)
        await self.tell()

    async def run(self) -> None:
        """Do so until cancelled."""
        await self.tell()
        while True:
            await self.step(60.0)

    def hold(self, wanted: Sequence[Wanted]) -> None:
        """Bring what is held in line, as an engine would."""
        self.held = {one.name: self.row(one.name, one.content_id) for one in wanted}

    def row(self, name: str, content: str, state: AdapterState | None = None) -> Holding:
        """A row of this life; loaded, or failed where it is to fail."""
        failed = state is None and name in self.failing
        return Holding(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            lora_id=lora_id(name, content),
            name=name,
            content_id=content,
            state=state or (AdapterState.FAILED if failed else AdapterState.LOADED),
            error="out of memory" if failed else "",
        )

    def restart(self) -> None:
        """Another life that holds nothing."""
        self._num_lives += 1
        self.incarnation = Incarnation(f"{self.worker_id}-{self._num_lives}")
        self.held = {}


class Fleet:
    """A table, and workers; all ends with the `async with`."""

    def __init__(
        self, folder: Path, adapters: Mapping[str, AdapterConfig | Path] | None = None, **settings: Any
    ) -> None:
        self.folder = folder
        self.table = LoraTable(make_desk(folder, adapters, **settings))
        self._tasks: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._tasks:
            for task in self._tasks:
                task.cancel()  # more than once: a wait that ends just then may swallow it
            _, left = await asyncio.wait(self._tasks, timeout=0.1)
            self._tasks = list(left)
        await self.table.close()

    def worker(self, worker_id: str = "w0", **facts: int) -> FakeWorker:
        """A worker that acts when it is told to."""
        return FakeWorker(self.table, worker_id, **facts)

    def runs(self, worker_id: str = "w0", **facts: int) -> FakeWorker:
        """A worker that acts by itself."""
        worker = self.worker(worker_id, **facts)
        self._tasks.append(asyncio.ensure_future(worker.run()))
        return worker

    async def view(self) -> TableView:
        """The table as routers get it."""
        return msgspec.msgpack.decode(await soon(self.table.wait_view("", -1, PATIENCE_S)), type=TableView)

    async def shown(self) -> dict[str, dict[str, str]]:
        """State by worker, by adapter."""
        shown: dict[str, dict[str, str]] = {}
        for row in (await self.view()).holdings:
            shown.setdefault(row.name, {})[row.worker_id] = row.state.value
        return shown

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until a change of the table makes `condition` true."""
        view = await self.view()
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                raw = await self.table.wait_view(view.epoch, view.version, PATIENCE_S)
                view = msgspec.msgpack.decode(raw, type=TableView)


async def soon(call: Awaitable[T]) -> T:
    """What must end by itself now, whatever longest wait it was given."""
    return await asyncio.wait_for(call, PATIENCE_S)
