"""More claims of actors/lora_table.py for its users: reload, pin, and what a restarted table still knows."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from actors import lora_table
from actors.adapters import placement
from actors.adapters.entry import AdapterConfig, Placement
from actors.engine.identity import content_id
from router.errors import AdapterRefused
from tests.actors.adapters.fleet import Fleet, soon
from tests.actors.adapters.making import make_adapter

ON_DEMAND = Placement.ON_DEMAND


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_table, "SETTLE_S", 0.0)
    monkeypatch.setattr(lora_table, "_TICK_S", 0.01)


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "a", seed=1)


# -- reload ------------------------------------------------------------------------------------------------------------


async def test_reload_of_the_same_content_changes_nothing(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path, {"a": a}) as fleet:
        worker = fleet.worker("w0")
        await worker.tell()
        await worker.step()
        revision = worker.assignment.revision

        report = await soon(fleet.table.reload("a"))

        assert (report["changed"], report["success"]) == (False, True)
        assert await fleet.shown() == {"a": {"w0": "loaded"}}
        assert (await worker.ask(), worker.assignment.revision) == (["a"], revision)


async def test_reload_of_other_content_takes_the_former_away_at_once_and_waits_for_the_new(
    tmp_path: Path, a: Path
) -> None:
    async with Fleet(tmp_path, {"a": a}) as fleet:
        worker = fleet.worker("w0")
        await worker.tell()
        await worker.step()
        make_adapter(a, seed=2)
        reloading = asyncio.ensure_future(fleet.table.reload("a", wait_s=60.0))
        await worker.ask(5.0)
        assert await fleet.shown() == {"a": {"w0": "unloading"}}
        await worker.tell()  # still of the former
        assert [one.content_id for one in worker.assignment.wanted] == [content_id(a)]
        await fleet.view()
        assert not reloading.done()

        worker.hold(worker.assignment.wanted)
        await worker.tell()

        report = await soon(reloading)
        assert (report["changed"], report["content_id"]) == (True, content_id(a))
        assert report["results"] == {"w0": {"state": "loaded", "load_s": 0.0}}
        assert await fleet.shown() == {"a": {"w0": "loaded"}}


@pytest.mark.parametrize("harm", ["gone", "too wide"])
async def test_reload_of_what_cannot_be_served_is_refused_and_the_former_stays(
    tmp_path: Path, a: Path, harm: str
) -> None:
    async with Fleet(tmp_path, {"a": a}) as fleet:
        worker = fleet.worker("w0")
        await worker.tell()
        await worker.step()
        before = await fleet.view()
        if harm == "gone":
            shutil.rmtree(a)
        else:
            make_adapter(a, config={"r": 64})

        with pytest.raises(AdapterRefused):
            await soon(fleet.table.reload("a"))

        assert await fleet.view() == before


async def test_reload_of_what_nobody_holds_ends_at_once(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path, {"a": a}, default_placement=ON_DEMAND) as fleet:
        await fleet.worker("w0").tell()
        await fleet.view()
        make_adapter(a, seed=2)

        report = await soon(fleet.table.reload("a", wait_s=60.0))

        assert (report["changed"], report["results"]) == (True, {})


async def test_what_is_being_reloaded_makes_no_room(tmp_path: Path, a: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "STAY_S", 0.0)
    adapters = {"a": a, "b": make_adapter(tmp_path / "b")}
    async with Fleet(tmp_path, adapters, default_placement=ON_DEMAND) as fleet:
        worker = fleet.worker("w0", capacity=1, slots=1)
        await worker.tell()
        await fleet.view()
        await fleet.table.want("a", [], 1, more=False)
        await worker.step()
        make_adapter(a, seed=2)
        await soon(fleet.table.reload("a", wait_s=0.0))

        await fleet.table.want("b", [], 1, more=False)
        assert await worker.ask() == ["a"]

        worker.hold(worker.assignment.wanted)
        await worker.tell()
        assert await worker.ask() == ["b"]


# -- pin ---------------------------------------------------------------------------------------------------------------


async def test_pinned_stays_where_it_is_until_it_is_unpinned(
    tmp_path: Path, a: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "STAY_S", 0.0)
    adapters = {"a": a, "b": make_adapter(tmp_path / "b")}
    async with Fleet(tmp_path, adapters, default_placement=ON_DEMAND) as fleet:
        worker = fleet.worker("w0", capacity=1, slots=1)
        await worker.tell()
        await fleet.view()
        await fleet.table.want("a", [], 1, more=False)
        await worker.step()
        report = await soon(fleet.table.pin("a", pinned=True))
        assert report["results"] == {"w0": {"state": "loaded", "load_s": 0.0}}

        await fleet.table.want("b", [], 1, more=False)
        assert await worker.ask() == ["a"]
        assert [one.pinned for one in worker.assignment.wanted] == [True]

        await soon(fleet.table.pin("a", pinned=False))
        await fleet.until(lambda: fleet.table.view().holdings[0].state == "unloading")
        assert await worker.ask() == ["b"]


async def test_pin_of_what_is_not_offered_is_refused(tmp_path: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(AdapterRefused, match="offered: none"):
            await soon(fleet.table.pin("a", pinned=True))


# -- restarts ----------------------------------------------------------------------------------------------------------


async def test_a_restarted_table_knows_what_users_changed(tmp_path: Path, a: Path) -> None:
    configured = {name: make_adapter(tmp_path / name, seed=seed) for seed, name in enumerate("xyz", start=5)}
    async with Fleet(tmp_path, configured) as fleet:
        await soon(fleet.table.load("a", str(a), placement="replicas", replicas=2, pinned=True, wait_s=0.0))
        await soon(fleet.table.load("b", str(a), wait_s=0.0))
        await soon(fleet.table.unload("b"))
        await soon(fleet.table.unload("x"))
        await soon(fleet.table.unload("y"))
        await soon(fleet.table.load("y", str(configured["y"]), wait_s=0.0))
        make_adapter(configured["z"], seed=9)
        await soon(fleet.table.reload("z", wait_s=0.0))
        await soon(fleet.table.pin("z", pinned=True))
        before = (await fleet.table.status())["catalogue"]
        assert [one["name"] for one in before] == ["a", "y", "z"]

    for run_id in ("run-1", "run-2"):
        async with Fleet(tmp_path, configured, run_id=run_id) as restarted:
            assert (await restarted.view()).names == ("a", "y", "z")
            assert (await restarted.table.status())["catalogue"] == before


async def test_wishes_that_come_at_once_are_all_kept(tmp_path: Path) -> None:
    adapters = {name: make_adapter(tmp_path / name, seed=seed) for seed, name in enumerate("abcdefgh")}
    async with Fleet(tmp_path, {name: adapters[name] for name in "ab"}) as fleet:
        await fleet.view()
        loads = [fleet.table.load(name, str(adapters[name]), wait_s=0.0) for name in "cdefgh"]
        await soon(asyncio.gather(*loads, fleet.table.unload("a"), fleet.table.pin("b", pinned=True)))
        before = (await fleet.table.status())["catalogue"]
        assert [one["name"] for one in before] == [*"bcdefgh"]

    async with Fleet(tmp_path, {name: adapters[name] for name in "ab"}) as restarted:
        assert (await restarted.view()).names == tuple("bcdefgh")
        assert (await restarted.table.status())["catalogue"] == before


async def test_names_that_look_alike_and_come_at_once_are_not_both_offered(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        await fleet.view()
        loads = [fleet.table.load(name, str(a), wait_s=0.0) for name in ("sql", "SQL")]

        ended = await soon(asyncio.gather(*loads, return_exceptions=True))

        assert [type(one) for one in ended].count(AdapterRefused) == 1
        assert len((await fleet.view()).names) == 1


# -- engines that can't load at run time -------------------------------------------------------------------------------


async def test_a_fixed_catalogue_refuses_changes(tmp_path: Path, a: Path) -> None:
    adapters = {"a": AdapterConfig(path=str(a))}
    async with Fleet(tmp_path, adapters, fixed=True) as fleet:
        before = await fleet.view()
        for change in (
            fleet.table.load("b", str(a)),
            fleet.table.load("a", str(a)),
            fleet.table.unload("a"),
            fleet.table.reload("a"),
        ):
            with pytest.raises(AdapterRefused, match=r"workers\.dp_size above 1 can't"):
                await soon(change)

        assert await fleet.view() == before
        assert before.names == ("a",)
