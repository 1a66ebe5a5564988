"""Claims of actors/lora_table.py for its users: load, unload, reload and pin, each with a result per worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors import lora_table
from actors.adapters import placement
from actors.adapters.entry import AdapterConfig, Placement
from actors.engine.identity import content_id
from router.errors import AdapterRefused
from tests.actors.adapters.fleet import Fleet, soon
from tests.actors.adapters.making import make_adapter, tensors_of

ON_DEMAND = Placement.ON_DEMAND


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_table, "SETTLE_S", 0.0)
    monkeypatch.setattr(lora_table, "_TICK_S", 0.01)


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "a", seed=1)


async def truth(fleet: Fleet) -> Any:
    """All that a user's refused wish mustn't change."""
    state = fleet.folder / "state" / "adapters.json"
    return await fleet.table.status(), state.read_text() if state.exists() else ""


# -- load --------------------------------------------------------------------------------------------------------------


async def test_load_waits_until_every_worker_has_it(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        workers = [fleet.worker("w0"), fleet.worker("w1")]
        for worker in workers:
            await worker.tell()
        loading = asyncio.ensure_future(fleet.table.load("a", str(a), wait_s=60.0))
        await fleet.until(lambda: "a" in fleet.table.view().names)
        await workers[0].step()
        await fleet.view()
        assert not loading.done()

        await workers[1].step()

        assert await soon(loading) == {
            "name": "a",
            "content_id": content_id(a),
            "success": True,
            "results": {name: {"state": "loaded", "load_s": 0.0} for name in ("w0", "w1")},
        }


async def test_load_tells_what_is_pending_when_its_time_is_up(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        await fleet.worker("w0").tell()

        report = await soon(fleet.table.load("a", str(a), wait_s=0.01))

        assert (report["success"], report["results"]) == (False, {"w0": {"state": "pending"}})


async def test_a_load_that_fails_on_one_worker_only_is_told_so_and_a_retry_heals_it(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        fleet.runs("w0")
        bad = fleet.worker("w1")
        bad.failing = {"a"}
        await bad.tell()
        loading = asyncio.ensure_future(fleet.table.load("a", str(a), wait_s=60.0))
        await bad.step(5.0)
        await bad.step(0.1)

        report = await soon(loading)

        assert report["success"]
        assert report["results"]["w0"] == {"state": "loaded", "load_s": 0.0}
        assert report["results"]["w1"] == {"state": "failed", "load_s": 0.0, "error": "out of memory"}
        assert (await fleet.shown())["a"] == {"w0": "loaded", "w1": "failed"}

        bad.failing = set()
        await bad.step()
        assert (await fleet.shown())["a"] == {"w0": "loaded", "w1": "loaded"}


async def test_a_load_that_fails_everywhere_is_no_success(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        fleet.runs("w0").failing = {"a"}

        assert not (await soon(fleet.table.load("a", str(a))))["success"]


async def test_load_on_demand_loads_once_and_asks_again_while_it_waits(
    tmp_path: Path, a: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "WAIT_S", 0.03)
    monkeypatch.setattr(placement, "STAY_S", 0.0)
    async with Fleet(tmp_path, {"x": make_adapter(tmp_path / "x")}, default_placement=ON_DEMAND) as fleet:
        worker = fleet.worker("w0", capacity=1, slots=1)
        await fleet.view()
        await worker.tell()
        await fleet.table.want("x", [], 1, more=False)
        assert await worker.ask() == ["x"]  # and is at it for longer than a wish lasts
        loading = asyncio.ensure_future(fleet.table.load("a", str(a), wait_s=60.0))
        await fleet.until(lambda: "a" in fleet.table.view().names)
        await asyncio.sleep(0.1)  # the time that passes is the case itself

        worker.hold(worker.assignment.wanted)
        await worker.tell()
        await worker.step(2.0)

        assert (await soon(loading))["results"] == {"w0": {"state": "loaded", "load_s": 0.0}}


async def test_a_load_that_is_unloaded_meanwhile_ends(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        loading = asyncio.ensure_future(fleet.table.load("a", str(a), wait_s=60.0))
        await fleet.until(lambda: "a" in fleet.table.view().names)

        await soon(fleet.table.unload("a"))

        assert not (await soon(loading))["success"]


async def test_loading_the_same_again_only_reports(tmp_path: Path, a: Path) -> None:
    terms = {"placement": ON_DEMAND, "replicas": 2, "max_replicas": 3, "pinned": True}
    async with Fleet(tmp_path, {"a": AdapterConfig(path=str(a), **terms)}) as fleet:
        for name in ("w0", "w1", "w2"):
            fleet.runs(name)
        await soon(fleet.table.load("a", str(a)))
        catalogue = (await fleet.table.status())["catalogue"]

        report = await soon(fleet.table.load("a", str(a)))

        assert len(report["results"]) == 2
        assert (await fleet.table.status())["catalogue"] == catalogue
        assert {key: catalogue[0][key] for key in terms} == terms


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("base", "{}/a", "is named like the served model 'base'"),
        ("base:a", "{}/a", "is named like the served model 'base'"),
        ("x=y", "{}/a", "must not hold '='"),
        ("OLD", "{}/a", "can't be told from 'old'"),
        ("old", "{}/a", "is offered already, from .*/old with content .*reload it"),
        ("new", "{}/../outside", r"lies under none of .*lora\.roots"),
        ("new", "s3://bucket/a", r"lies under none of .*lora\.roots"),
        ("new", "{}/wide", r"lora\.max_rank 8"),
        ("new", "{}/other-base", "the model's v_proj is 8 wide there"),
        ("new", "{}/missing", "missing"),
        ("new", "{}/no\0where", ""),
    ],
)
async def test_what_cannot_be_served_is_refused_and_nothing_is_changed(
    tmp_path: Path, a: Path, name: str, source: str, message: str
) -> None:
    make_adapter(tmp_path / "wide", config={"r": 64})
    tensors = tensors_of()
    narrow = {key: value[:4] if "v_proj.lora_B" in key else value for key, value in tensors.items()}
    make_adapter(tmp_path / "other-base", tensors=narrow)
    async with Fleet(tmp_path, {"old": make_adapter(tmp_path / "old")}) as fleet:
        await fleet.view()
        before = await truth(fleet)

        with pytest.raises(AdapterRefused, match=message):
            await soon(fleet.table.load(name, source.format(tmp_path)))

        assert await truth(fleet) == before


async def test_other_content_under_an_offered_name_is_refused(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path, {"a": a}) as fleet:
        await fleet.view()
        before = await truth(fleet)
        make_adapter(a, seed=2)

        with pytest.raises(AdapterRefused, match="reload it if its files have changed"):
            await soon(fleet.table.load("a", str(a)))

        assert await truth(fleet) == before


async def test_what_cannot_be_kept_on_disk_is_refused(tmp_path: Path, a: Path) -> None:
    (tmp_path / "full").write_text("no folder")
    async with Fleet(tmp_path, state_file=str(tmp_path / "full" / "adapters.json")) as fleet:
        with pytest.raises(AdapterRefused, match="can't be kept on disk"):
            await soon(fleet.table.load("a", str(a)))

        assert (await fleet.view()).names == ()


# -- unload ------------------------------------------------------------------------------------------------------------


async def test_unload_is_gone_from_names_at_once_and_waits_until_workers_have_let_go(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path, {"a": a}) as fleet:
        workers = [fleet.worker("w0"), fleet.worker("w1")]
        for worker in workers:
            await worker.tell()
            await worker.step()
        unloading = asyncio.ensure_future(fleet.table.unload("a", wait_s=60.0))
        await fleet.until(lambda: "a" not in fleet.table.view().names)
        assert (await fleet.shown())["a"] == {"w0": "unloading", "w1": "unloading"}
        await fleet.table.want("a", [], 9, more=False)  # nothing loads it again by itself
        await workers[0].step()
        assert not unloading.done()

        await workers[1].step()

        results = {"w0": {"state": "unloaded"}, "w1": {"state": "unloaded"}}
        assert await soon(unloading) == {"name": "a", "success": True, "results": results}
        assert await fleet.shown() == {}


async def test_unload_tells_which_worker_did_not_answer_in_time(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path, {"a": a}) as fleet:
        good, silent = fleet.worker("w0"), fleet.worker("w1")
        for worker in (good, silent):
            await worker.tell()
            await worker.step()
        unloading = asyncio.ensure_future(fleet.table.unload("a", wait_s=0.2))
        await fleet.until(lambda: "a" not in fleet.table.view().names)
        await good.step()

        report = await soon(unloading)

        assert not report["success"]
        assert report["results"] == {"w0": {"state": "unloaded"}, "w1": {"state": "loaded"}}
        assert await silent.ask() == []  # it is told so whenever it asks


async def test_unload_of_what_is_not_offered_is_refused_with_what_is(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path, {"a": a}) as fleet:
        for name in ("b", ""):
            with pytest.raises(AdapterRefused, match=r"isn't offered; offered: a$"):
                await soon(fleet.table.unload(name))


async def test_a_worker_that_is_away_is_not_told_to_hold_what_was_unloaded_meanwhile(tmp_path: Path, a: Path) -> None:
    async with Fleet(tmp_path, {"a": a}) as fleet:
        worker = fleet.worker("w0")
        await worker.tell()
        assert await worker.ask() == ["a"]
        worker.restart()
        worker.facts, facts = None, worker.facts
        await worker.tell()

        await soon(fleet.table.unload("a"))

        assert await worker.ask() == []
        worker.facts = facts
        await worker.tell()
        assert await worker.ask() == []


@pytest.mark.parametrize("configured", [True, False])
async def test_a_name_in_another_unicode_form_is_the_same_adapter(tmp_path: Path, a: Path, configured: bool) -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    adapters = {decomposed: a} if configured else {}
    async with Fleet(tmp_path, adapters) as fleet:
        fleet.runs("w0")
        await soon(fleet.table.load(decomposed, str(a)))
        assert (await fleet.view()).names == (composed,)
        assert (await soon(fleet.table.unload(decomposed)))["success"]

    async with Fleet(tmp_path, adapters) as restarted:
        assert (await restarted.view()).names == ()
