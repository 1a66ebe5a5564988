"""Claims of actors/lora_table.py at its start: what is offered then, and that nothing is shown before it is whole."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from actors import lora_table
from actors.adapters.entry import AdapterConfig, Placement
from actors.engine.identity import content_id
from tests.actors.adapters.fleet import PATIENCE_S, Fleet, soon
from tests.actors.adapters.making import make_adapter


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_table, "SETTLE_S", 0.0)
    monkeypatch.setattr(lora_table, "_TICK_S", 0.01)


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    return {name: make_adapter(tmp_path / name, seed=seed) for seed, name in enumerate("ba")}


class SlowFiles(MemoryFileSystem):
    """A store that answers only once it may."""

    protocol = "slow"
    asked = threading.Event()
    answers = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("slow:/")))

    def isfile(self, path: str) -> bool:
        self.asked.set()
        assert self.answers.wait(PATIENCE_S)
        return bool(super().isfile(path))


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowFiles]:
    fsspec.register_implementation("slow", SlowFiles, clobber=True)
    files = SlowFiles()
    SlowFiles.answers.set()
    files.put(str(make_adapter(tmp_path / "c", seed=3)), "/bucket/c", recursive=True)
    SlowFiles.asked.clear()
    SlowFiles.answers.clear()
    yield files
    SlowFiles.answers.set()
    files.store.clear()


async def test_a_catalogue_is_never_shown_half_read(tmp_path: Path, adapters: dict[str, Path], slow: SlowFiles) -> None:
    async with Fleet(tmp_path, {**adapters, "c": AdapterConfig(path="slow://bucket/c")}) as fleet:
        worker = fleet.worker()
        await worker.tell()
        view = asyncio.ensure_future(fleet.view())
        wanted = asyncio.ensure_future(worker.ask(PATIENCE_S))
        assert await asyncio.to_thread(slow.asked.wait, PATIENCE_S)
        status = await fleet.table.status()
        assert (len(status["catalogue"]), status["unread"], status["adapters"]) == (2, 1, ["a", "b", "c"])
        assert not view.done()
        assert not wanted.done()

        slow.answers.set()

        assert (await soon(view)).names == ("a", "b", "c")
        assert await soon(wanted) == ["a", "b", "c"]


async def test_a_young_table_shows_itself_once_workers_have_had_time_to_tell(
    tmp_path: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_table, "SETTLE_S", 0.2)
    started_s = time.monotonic()
    async with Fleet(tmp_path, adapters) as fleet:
        waiting = asyncio.ensure_future(fleet.view())
        worker = fleet.worker()
        await worker.tell(worker.row("a", content_id(adapters["a"])))

        view = await soon(waiting)

    assert time.monotonic() - started_s >= 0.2
    assert (view.names, len(view.holdings)) == (("a", "b"), 1)


async def test_a_restarted_table_has_another_epoch_so_that_its_lower_version_counts(
    tmp_path: Path, adapters: dict[str, Path]
) -> None:
    async with Fleet(tmp_path, adapters) as old, Fleet(tmp_path, adapters) as new:
        old_worker = old.worker()
        await old_worker.tell()
        await old_worker.step()
        known = await old.view()

        view = await soon(new.table.wait_view(known.epoch, known.version, 60.0))

        assert known.epoch.encode() not in view
        assert (await new.view()).version < known.version


@pytest.mark.parametrize("placement", Placement)
async def test_a_restarted_table_leaves_adapters_where_they_are(
    tmp_path: Path, adapters: dict[str, Path], placement: Placement
) -> None:
    configured = {name: AdapterConfig(path=str(path), placement=placement) for name, path in adapters.items()}
    async with Fleet(tmp_path, configured) as fleet:
        workers = [fleet.worker(name, capacity=2, slots=1) for name in ("w0", "w1")]
        for worker in workers:
            await worker.tell()
        await fleet.view()
        for name, worker in zip("ab", workers, strict=True):
            await fleet.table.want(name, [worker.worker_id], 1, more=False)
        for worker in workers:
            await worker.step()
        before = await fleet.shown()
        assert before.keys() == {"a", "b"}

    async with Fleet(tmp_path, configured) as restarted:
        for worker in reversed(workers):
            worker.table = restarted.table
            await worker.tell()

        assert await restarted.shown() == before
        for worker in workers:
            await worker.step()
        assert await restarted.shown() == before


@pytest.mark.parametrize("name", ["base", "base:v2", "a=b"])
async def test_what_cannot_be_served_is_named_and_the_others_are_offered(
    tmp_path: Path, adapters: dict[str, Path], name: str
) -> None:
    too_wide = make_adapter(tmp_path / "wide", config={"r": 64})
    bad = {name: adapters["a"], "wide": too_wide, "missing": tmp_path / "missing"}
    async with Fleet(tmp_path, {**bad, **adapters}) as fleet:
        assert (await fleet.view()).names == ("a", "b")

        rejected = (await fleet.table.status())["rejected"]
        assert rejected.keys() == bad.keys()
        assert "max_rank" in rejected["wide"]
        assert str(tmp_path / "missing") in rejected["missing"]


async def test_a_damaged_state_file_is_an_error_that_names_it(tmp_path: Path, adapters: dict[str, Path]) -> None:
    state = tmp_path / "state" / "adapters.json"
    state.parent.mkdir()
    state.write_text("{")

    async with Fleet(tmp_path, adapters) as fleet:
        with pytest.raises(ValueError, match=r"adapters\.json is no catalogue of adapters"):
            await fleet.view()
        assert "adapters.json is no catalogue of adapters" in (await fleet.table.status())["error"]
    assert state.read_text() == "{"


async def test_adapters_of_this_run_need_not_be_read_again(tmp_path: Path, adapters: dict[str, Path]) -> None:
    async with Fleet(tmp_path, adapters) as fleet:
        before = (await fleet.table.status())["catalogue"] if (await fleet.view()).names else None
    make_adapter(adapters["a"], seed=9)

    async with Fleet(tmp_path, adapters) as fleet:
        await fleet.view()
        assert (await fleet.table.status())["catalogue"] == before
    async with Fleet(tmp_path, adapters, run_id="run-2") as fleet:
        await fleet.view()
        contents = {one["name"]: one["content_id"] for one in (await fleet.table.status())["catalogue"]}
        assert contents == {name: content_id(path) for name, path in adapters.items()}


async def test_a_base_model_that_is_no_folder_here_is_not_compared_with(
    tmp_path: Path, adapters: dict[str, Path]
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"hidden_size": 99, "num_attention_heads": 3}))
    async with Fleet(tmp_path, adapters, model_path="org/model") as fleet:
        assert (await fleet.view()).names == ("a", "b")
        assert (await fleet.table.status())["rejected"] == {}
