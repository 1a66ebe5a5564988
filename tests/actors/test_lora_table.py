"""Claims of actors/lora_table.py: one truth at a version, told to routers and to workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors import lora_table
from actors.adapters.entry import AdapterConfig, Placement
from actors.engine.identity import content_id
from router.ids import WorkerId
from router.reports import AdapterState, TableView
from tests.actors.adapters.fleet import PATIENCE_S, Fleet, soon
from tests.actors.adapters.making import make_adapter

W0, W1 = WorkerId("w0"), WorkerId("w1")


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_table, "SETTLE_S", 0.0)
    monkeypatch.setattr(lora_table, "_TICK_S", 0.01)


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    return {name: make_adapter(tmp_path / name, seed=seed) for seed, name in enumerate("ba")}


def on_demand(adapters: dict[str, Path], **terms: Any) -> dict[str, AdapterConfig]:
    return {
        name: AdapterConfig(path=str(path), placement=Placement.ON_DEMAND, **terms) for name, path in adapters.items()
    }


def decoded(raw: bytes) -> TableView:
    return msgspec.msgpack.decode(raw, type=TableView)


# -- what is shown -----------------------------------------------------------------------------------------------------


async def test_view_aggregates_all_workers(tmp_path: Path, adapters: dict[str, Path]) -> None:
    async with Fleet(tmp_path, adapters) as fleet:
        workers = [fleet.worker("w1"), fleet.worker("w0")]
        for worker in workers:
            await worker.tell()
            await worker.step()

        view = await fleet.view()

    assert view.names == ("a", "b")
    assert view.holdings == (*workers[1].held.values(), *workers[0].held.values())
    assert {(row.worker_id, row.name, row.state) for row in view.holdings} == {
        (worker_id, name, "loaded") for worker_id in (W0, W1) for name in "ab"
    }


async def test_telling_the_same_again_is_no_new_version(tmp_path: Path, adapters: dict[str, Path]) -> None:
    async with Fleet(tmp_path, adapters) as fleet:
        worker = fleet.worker()
        await worker.tell()
        await worker.step()
        version = (await fleet.view()).version
        told = [await fleet.table.tell(W0, worker.incarnation, list(worker.held.values()), worker.facts)] * 3

        assert [one.version for one in told] == [version] * 3
        assert (await fleet.view()).version == version


async def test_a_new_life_replaces_the_old_one(tmp_path: Path, adapters: dict[str, Path]) -> None:
    async with Fleet(tmp_path, adapters) as fleet:
        worker = fleet.worker()
        await worker.tell()
        await worker.step()
        worker.restart()
        await worker.tell()

        assert (await fleet.view()).holdings == ()
        await worker.step()
        assert await fleet.shown() == {"a": {W0: "loaded"}, "b": {W0: "loaded"}}


async def test_a_forgotten_worker_holds_nothing(tmp_path: Path, adapters: dict[str, Path]) -> None:
    async with Fleet(tmp_path, adapters) as fleet:
        worker = fleet.worker()
        await worker.tell()
        await worker.step()
        before = await fleet.view()
        await fleet.table.forget(W0)
        await fleet.table.forget(W0)
        after = await fleet.view()

        assert (after.holdings, after.version) == ((), before.version + 1)
        assert await worker.ask() == []


async def test_a_worker_that_tells_nothing_holds_nothing(
    tmp_path: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet(tmp_path, adapters) as fleet:
        worker = fleet.worker()
        await worker.tell()
        await worker.step()
        assert await fleet.shown() != {}
        monkeypatch.setattr(lora_table, "SILENT_S", 0.02)

        await fleet.until(lambda: fleet.table.view().holdings == ())

        monkeypatch.setattr(lora_table, "SILENT_S", 60.0)
        await worker.tell()  # it was only slow
        assert await fleet.shown() == {"a": {W0: "loaded"}, "b": {W0: "loaded"}}


async def test_what_is_of_other_content_or_not_wanted_shows_as_unloading(
    tmp_path: Path, adapters: dict[str, Path]
) -> None:
    async with Fleet(tmp_path, on_demand(adapters)) as fleet:
        await fleet.view()
        worker, other = fleet.worker("w0"), fleet.worker("w1")
        await worker.tell()
        await other.tell()
        await fleet.table.want("a", [W0], 1, more=False)
        a = content_id(adapters["a"])
        await worker.tell(worker.row("a", a), worker.row("unknown", "c"))
        await other.tell(other.row("a", a))
        assert await fleet.shown() == {"a": {W0: "loaded", W1: "unloading"}, "unknown": {W0: "unloading"}}

        await worker.tell(worker.row("a", "former content"))

        assert (await fleet.shown())["a"][W0] == "unloading"


async def test_a_worker_that_serves_no_more_changes_the_version_with_the_view(
    tmp_path: Path, adapters: dict[str, Path]
) -> None:
    async with Fleet(tmp_path, adapters) as fleet:
        worker = fleet.worker()
        await worker.tell()
        await worker.step()
        before = await fleet.view()

        worker.facts = None
        await worker.tell()

        after = await fleet.view()
        assert {row.state for row in after.holdings} == {AdapterState.UNLOADING}
        assert after.version > before.version


# -- long polls --------------------------------------------------------------------------------------------------------


async def test_a_waiting_router_hears_the_next_version(tmp_path: Path, adapters: dict[str, Path]) -> None:
    async with Fleet(tmp_path, adapters) as fleet:
        worker = fleet.worker()
        await worker.tell()
        first = await fleet.view()
        waiting = asyncio.ensure_future(fleet.table.wait_view(first.epoch, first.version, 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()

        await worker.step()

        assert decoded(await soon(waiting)).version == first.version + 1


async def test_a_poll_that_hears_nothing_new_ends_with_what_is_known(tmp_path: Path, adapters: dict[str, Path]) -> None:
    async with Fleet(tmp_path, adapters) as fleet:
        worker = fleet.worker()
        await worker.tell()
        view, names = await fleet.view(), await worker.ask()

        assert decoded(await soon(fleet.table.wait_view(view.epoch, view.version, 0.01))) == view
        assert await soon(worker.ask(0.01)) == names == ["a", "b"]


@pytest.mark.parametrize("num_steps", range(6))
async def test_a_poll_that_is_given_up_ends_though_it_hears_something(tmp_path: Path, num_steps: int) -> None:
    async with Fleet(tmp_path) as fleet:
        worker = fleet.worker()
        await worker.tell()
        await worker.ask()
        waiting = asyncio.ensure_future(worker.ask(60.0))
        for _ in range(5):
            await asyncio.sleep(0)
        await worker.tell(worker.row("a", "c"))
        for _ in range(num_steps):
            await asyncio.sleep(0)

        waiting.cancel()

        assert (await asyncio.wait({waiting}, timeout=0.5))[0]


async def test_configured_adapters_are_offered_and_given_to_workers_that_serve(
    tmp_path: Path, adapters: dict[str, Path]
) -> None:
    async with Fleet(tmp_path, adapters) as fleet:
        serving, starting = fleet.worker("w0"), fleet.worker("w1")
        starting.facts = None
        await serving.tell()
        await starting.tell()

        assert (await fleet.view()).names == ("a", "b")
        assert (await serving.ask(), await starting.ask()) == (["a", "b"], [])
        assert serving.assignment.revision > starting.assignment.revision == 0
        assert [(one.source, one.content_id) for one in serving.assignment.wanted] == [
            (str(adapters[name]), content_id(adapters[name])) for name in "ba"
        ]


async def test_a_waiting_worker_hears_what_it_is_to_hold(tmp_path: Path, adapters: dict[str, Path]) -> None:
    async with Fleet(tmp_path, on_demand(adapters)) as fleet:
        worker = fleet.worker()
        await worker.tell()
        await worker.ask()
        before = worker.assignment
        waiting = asyncio.ensure_future(worker.ask(60.0))
        await asyncio.sleep(0)
        assert not waiting.done()

        await fleet.table.want("a", [W0], 1, more=False)

        assert await soon(waiting) == ["a"]
        assert worker.assignment.revision > before.revision


# -- what requests wait for --------------------------------------------------------------------------------------------


async def test_what_is_wanted_goes_where_it_is_preferred_and_the_least_used_makes_room(
    tmp_path: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.adapters.placement.STAY_S", 0.0)
    adapters["c"] = make_adapter(tmp_path / "c", seed=7)
    async with Fleet(tmp_path, on_demand(adapters)) as fleet:
        workers = [fleet.worker(name, capacity=1, slots=1) for name in ("w0", "w1")]
        for worker in workers:
            await worker.tell()
        await fleet.view()
        await fleet.table.want("a", [W1, W0], 1, more=False)
        await fleet.table.want("b", [W1, W0], 1, more=False)
        for worker in workers:
            await worker.step()
        assert await fleet.shown() == {"a": {W1: "loaded"}, "b": {W0: "loaded"}}

        await fleet.table.use({"a": 1, "b": 2})
        await fleet.table.want("c", [W0, W1], 1, more=False)

        assert [await worker.ask() for worker in workers] == [["b"], ["c"]]
        assert (await fleet.shown())["a"] == {W1: "unloading"}
        assert (await fleet.table.status())["evictions"] == 1


async def test_a_wish_is_granted_as_soon_as_what_is_there_may_leave(
    tmp_path: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.adapters.placement.STAY_S", 0.05)
    async with Fleet(tmp_path, on_demand(adapters)) as fleet:
        worker = fleet.worker(capacity=1, slots=1)
        await worker.tell()
        await fleet.view()
        await fleet.table.want("a", [], 1, more=False)
        await worker.step()

        await fleet.table.want("b", [], 1, more=False)

        assert (await worker.ask(), (await fleet.table.status())["waiting"]) == (["a"], 1)
        assert await worker.ask(PATIENCE_S) == ["b"]


@pytest.mark.parametrize("max_replicas", [None, 1])
async def test_what_all_holders_fail_to_load_is_tried_elsewhere(
    tmp_path: Path, adapters: dict[str, Path], max_replicas: int | None
) -> None:
    async with Fleet(tmp_path, on_demand(adapters, max_replicas=max_replicas)) as fleet:
        good, bad = fleet.worker("w0"), fleet.worker("w1")
        bad.failing = {"a"}
        await good.tell()
        await bad.tell()
        await fleet.view()
        for _ in range(2):
            await fleet.table.want("a", [W1, W0], 1, more=False)
            await good.step()
            await bad.step()

        assert (await fleet.shown())["a"][W0] == "loaded"
