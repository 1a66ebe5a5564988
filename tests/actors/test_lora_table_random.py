"""Random histories of actors/lora_table.py against naive expectations: users, routers, workers that fail and die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors import lora_table
from actors.adapters.entry import Placement
from actors.engine.identity import content_id
from router.errors import AdapterRefused
from router.ids import WorkerId
from router.reports import AdapterState, TableView
from tests.actors.adapters.fleet import FakeWorker, Fleet
from tests.actors.adapters.making import make_adapter

NAMES = "abcdef"
NUM_WORKERS = 3
NUM_STEPS = 150


class Clock:
    """Time as the table sees it, in place of its `time` and `asyncio`; goes by only where a story says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._moved = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            await self._moved.wait()

    def move(self, seconds: float) -> None:
        self.now_s += seconds
        self._moved.set()
        self._moved = asyncio.Event()


class Story:
    """One history. Steps are its `do_` methods, in random order."""

    def __init__(self, folder: Path, clock: Clock, rng: random.Random, *, capacity: int) -> None:
        self.folder, self.clock, self.rng, self.capacity = folder, clock, rng, capacity
        self.sources = {name: make_adapter(folder / name, seed=seed) for seed, name in enumerate(NAMES)}
        self.contents = {name: content_id(source) for name, source in self.sources.items()}
        #: the catalogue as it must be: content id by name
        self.offered = {name: self.contents[name] for name in "ab"}
        self.placements = dict.fromkeys("ab", Placement.EVERYWHERE)
        self.replicas: dict[str, int] = {}
        self.fleet = self._new_fleet()
        self.workers = [self._worker(i) for i in range(NUM_WORKERS)]
        self.dead: set[WorkerId] = set()
        #: every view that was ever seen, by epoch and version
        self.seen: dict[tuple[str, int], bytes] = {}
        self.version = ("", -1)

    def _new_fleet(self) -> Fleet:
        return Fleet(self.folder, {name: self.folder / name for name in "ab"})

    def _worker(self, index: int) -> FakeWorker:
        return self.fleet.worker(f"w{index}", capacity=self.capacity, slots=2)

    # -- users -------------------------------------------------------------------------------------------------------

    async def do_load(self, name: str) -> None:
        known, present = self.offered.get(name), self.contents[name]
        placement, replicas = self.rng.choice(list(Placement)), self.rng.randint(1, 2)
        terms: dict[str, Any] = {"placement": placement.value, "replicas": replicas, "pinned": self.rng.random() < 0.2}
        loading = self.fleet.table.load(name, str(self.sources[name]), **terms, wait_s=0.0)
        if known not in (None, present):
            with pytest.raises(AdapterRefused):
                await loading
            return
        await loading
        self.offered[name] = present
        if known is None:
            self.placements[name], self.replicas[name] = placement, replicas

    async def do_unload(self, name: str) -> None:
        unloading = self.fleet.table.unload(name, wait_s=0.0)
        if name not in self.offered:
            with pytest.raises(AdapterRefused):
                await unloading
            return
        await unloading
        del self.offered[name]

    async def do_reload(self, name: str) -> None:
        if self.rng.random() < 0.5:
            make_adapter(self.sources[name], seed=self.rng.randint(100, 1 << 30))
            self.contents[name] = content_id(self.sources[name])
        if name in self.offered and self.rng.random() < 0.8:
            report = await self.fleet.table.reload(name, wait_s=0.0)
            assert report["changed"] == (self.offered[name] != self.contents[name])
            self.offered[name] = self.contents[name]

    async def do_pin(self, name: str) -> None:
        if name in self.offered:
            await self.fleet.table.pin(name, pinned=self.rng.random() < 0.3)

    # -- routers -----------------------------------------------------------------------------------------------------

    async def do_want(self, name: str) -> None:
        preferred = [worker.worker_id for worker in self.rng.sample(self.workers, k=2)]
        await self.fleet.table.want(name, preferred, self.rng.randint(1, 5), more=self.rng.random() < 0.3)

    async def do_use(self, name: str) -> None:
        await self.fleet.table.use({name: self.rng.randint(1, 9)})

    # -- workers -----------------------------------------------------------------------------------------------------

    async def do_follow(self, name: str) -> None:
        worker = self.rng.choice(self.workers)
        if worker.worker_id not in self.dead:
            worker.failing = {name} if self.rng.random() < 0.3 else set()
            await self.rng.choice([worker.step, worker.step, worker.ask, worker.tell])()

    async def do_end(self, _: str) -> None:
        worker = self.rng.choice(self.workers)
        how = self.rng.choice(["dies", "restarts", "stops serving", "serves again"])
        if how == "dies":
            self.dead.add(worker.worker_id)
        elif worker.worker_id not in self.dead:
            if how == "restarts":
                worker.restart()
            whole = self.fleet.worker(worker.worker_id, capacity=self.capacity, slots=2).facts
            worker.facts = None if how == "stops serving" else whole
            await worker.tell()

    async def do_pass_time(self, _: str) -> None:
        self.clock.move(self.rng.choice([0.1, 1.0, 3.0]))
        for worker in self.workers:
            if worker.worker_id not in self.dead:
                await worker.tell()

    async def restart_table(self) -> None:
        await self.fleet.table.close()
        self.fleet = self._new_fleet()
        for worker in self.workers:
            worker.table = self.fleet.table
            if worker.worker_id not in self.dead:
                await worker.tell()

    # -- expectations ------------------------------------------------------------------------------------------------

    async def look(self) -> TableView:
        """What a router sees; as another saw it at that version, never an older one, and nothing that isn't so."""
        for _ in range(4):
            await asyncio.sleep(0)  # the table's own clockwork turns once
        raw = await self.fleet.table.wait_view("", -1, 0.0)
        view = msgspec.msgpack.decode(raw, type=TableView)
        assert self.seen.setdefault((view.epoch, view.version), raw) == raw
        assert view.epoch != self.version[0] or view.version >= self.version[1]
        self.version = (view.epoch, view.version)
        assert view.names == tuple(sorted(self.offered))
        for row in view.holdings:
            if row.state is not AdapterState.UNLOADING:
                assert self.offered[row.name] == row.content_id
        wanted = (await self.fleet.table.status())["wanted"]
        assert all(len(names) <= self.capacity and set(names) <= self.offered.keys() for names in wanted.values())
        return view

    async def rest(self) -> None:
        """Everybody is well for a while."""
        self.dead.clear()
        for worker in self.workers:
            worker.failing = set()
            worker.facts = self.fleet.worker(worker.worker_id, capacity=self.capacity, slots=2).facts
        for _ in range(12):
            self.clock.move(1.0)
            for worker in self.workers:
                await worker.tell()
                await worker.step()
            await self.look()

    async def check_at_rest(self) -> None:
        view = await self.look()
        assert {row.state for row in view.holdings} <= {AdapterState.LOADED}
        loaded = {(row.name, row.worker_id) for row in view.holdings}
        for name in self.offered:
            holders = [worker for worker in self.workers if (name, worker.worker_id) in loaded]
            if self.placements[name] is Placement.EVERYWHERE:
                full = [worker for worker in self.workers if len(worker.held) == self.capacity]
                assert all(worker in holders or worker in full for worker in self.workers), name
            if self.placements[name] is Placement.REPLICAS and self.capacity >= len(NAMES):
                assert len(holders) == self.replicas[name], name


async def tell_story(story: Story, steps: Sequence[str], num_steps: int) -> None:
    for _ in range(num_steps):
        await getattr(story, story.rng.choice(steps))(story.rng.choice(NAMES))
        await story.look()


@pytest.mark.parametrize("capacity", [2, len(NAMES)])
@pytest.mark.parametrize("seed", range(3))
async def test_any_history_ends_with_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, capacity: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(lora_table, "time", clock)
    monkeypatch.setattr(lora_table, "asyncio", clock)
    monkeypatch.setattr(lora_table, "SETTLE_S", 0.0)
    story = Story(tmp_path, clock, random.Random(seed), capacity=capacity)
    steps = [name for name in dir(Story) if name.startswith("do_")] + ["do_follow"] * 4
    try:
        await story.look()  # the catalogue is read once, now
        for _ in range(2):
            await tell_story(story, steps, NUM_STEPS // 2)
            await story.rest()
            await story.check_at_rest()
            await story.restart_table()
        await story.rest()
        await story.check_at_rest()
    finally:
        await story.fleet.table.close()
