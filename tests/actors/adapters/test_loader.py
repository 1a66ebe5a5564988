"""Claims of actors/adapters/loader.py: an engine comes to hold what it is to hold, and every step is told."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.adapters import loader
from actors.engine.identity import lora_id
from tests.actors.adapters.bench import PATIENCE_S, Bench
from tests.actors.adapters.bench import running as running_bench


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(loader, "_BACKOFF_S", (0.001, 0.002))
    bench = Bench(tmp_path)
    async with running_bench(bench):
        yield bench


async def test_what_is_wanted_is_loaded_and_told_with_the_id_that_the_engine_gives_it(bench: Bench) -> None:
    a, b = bench.wanted("a", seed=1), bench.wanted("b", seed=2, pinned=True)

    bench.loader.assign([a, b])
    await bench.until(lambda: bench.states == {"a": "loaded", "b": "loaded"})

    assert bench.engine.calls == ["load a", "load b"]
    assert (bench.engine.loaded, bench.engine.pinned) == ({"a": a.content_id, "b": b.content_id}, {"b"})
    rows = {row.name: row for row in bench.loader.holdings}
    for one in (a, b):
        row = rows[one.name]
        assert (row.worker_id, row.incarnation, row.content_id) == ("w0", "i0", one.content_id)
        assert row.lora_id == lora_id(one.name, one.content_id)
        assert (row.error, row.load_s >= 0) == ("", True)


async def test_every_change_is_told(bench: Bench) -> None:
    bench.loader.assign([bench.wanted("a")])
    await bench.until(lambda: bench.states == {"a": "loaded"})
    bench.loader.assign([])
    await bench.until(lambda: bench.states == {})

    assert bench.told == ["a loading", "a loaded", "a unloading"]
    assert bench.num_changes == 4


async def test_being_told_the_same_again_does_nothing(bench: Bench) -> None:
    wanted = [bench.wanted("a")]
    bench.loader.assign(wanted)
    await bench.until(lambda: bench.states == {"a": "loaded"})
    bench.loader.assign(wanted)
    bench.loader.assign([*wanted, bench.wanted("b")])
    await bench.until(lambda: bench.states == {"a": "loaded", "b": "loaded"})

    assert bench.engine.calls == ["load a", "load b"]


async def test_what_is_not_wanted_goes_before_anything_comes(bench: Bench) -> None:
    bench.loader.assign([bench.wanted("a"), bench.wanted("b")])
    await bench.until(lambda: bench.states == {"a": "loaded", "b": "loaded"})
    bench.engine.calls.clear()

    bench.loader.assign([bench.wanted("c"), bench.wanted("d"), bench.wanted("b")])
    await bench.until(lambda: bench.states == {"b": "loaded", "c": "loaded", "d": "loaded"})

    assert bench.engine.calls == ["unload a", "load c", "load d"]


async def test_other_content_is_unloaded_and_then_loaded(bench: Bench) -> None:
    former, present = bench.wanted("a", seed=1), bench.wanted("a", seed=2)
    bench.loader.assign([former])
    await bench.until(lambda: bench.states == {"a": "loaded"})

    bench.loader.assign([present])
    await bench.until(lambda: [row.content_id for row in bench.loader.holdings] == [present.content_id])
    await bench.until(lambda: bench.states == {"a": "loaded"})

    assert bench.engine.calls == ["load a", "unload a", "load a"]
    assert bench.engine.loaded == {"a": present.content_id}


async def test_other_content_that_is_wanted_while_one_is_being_loaded_comes_next(bench: Bench) -> None:
    former, present = bench.wanted("a", seed=1), bench.wanted("a", seed=2)
    bench.engine.goes_on.clear()
    bench.loader.assign([former])
    await bench.until(lambda: bench.states == {"a": "loading"})

    bench.loader.assign([present])
    bench.engine.goes_on.set()
    await bench.until(lambda: bench.engine.loaded == {"a": present.content_id} and bench.states == {"a": "loaded"})

    assert {row.content_id for row in bench.loader.holdings} == {present.content_id}


async def test_a_load_that_fails_is_told_tried_again_and_holds_up_no_other(bench: Bench) -> None:
    bench.engine.failures["load a"] = 3

    bench.loader.assign([bench.wanted("a"), bench.wanted("b")])
    await bench.until(lambda: "a failed" in bench.told)
    assert [row.error for row in bench.loader.holdings if row.state == "failed"] == ["out of memory"]
    await bench.until(lambda: bench.states == {"a": "loaded", "b": "loaded"})

    assert sorted(call for call in bench.engine.calls if call.startswith("load")) == ["load a"] * 4 + ["load b"]
    assert [row.error for row in bench.loader.holdings] == ["", ""]


async def test_a_failure_is_not_tried_again_at_once_though_others_are_assigned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_BACKOFF_S", (3600.0,))
    bench.engine.failures["load a"] = 1
    bench.loader.assign([bench.wanted("a")])
    await bench.until(lambda: bench.states == {"a": "failed"})

    bench.loader.assign([bench.wanted("a"), bench.wanted("b")])
    await bench.until(lambda: bench.states == {"a": "failed", "b": "loaded"})
    assert bench.engine.calls == ["load a", "load b"]

    bench.loader.assign([bench.wanted("a", seed=5)])  # other content has not failed yet
    await bench.until(lambda: bench.states == {"a": "loaded"})


async def test_a_source_that_cannot_be_read_is_a_failure_that_heals(bench: Bench) -> None:
    wanted = bench.wanted("a", seed=3)
    shutil.rmtree(wanted.source)
    bench.loader.assign([wanted])
    await bench.until(lambda: bench.states == {"a": "failed"})
    assert wanted.source in bench.loader.holdings[0].error

    bench.wanted("a", seed=3)
    await bench.until(lambda: bench.states == {"a": "loaded"})


async def test_a_failure_of_what_is_wanted_no_more_is_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_BACKOFF_S", (3600.0,))
    bench.engine.failures["load a"] = 1
    bench.loader.assign([bench.wanted("a")])
    await bench.until(lambda: bench.states == {"a": "failed"})

    bench.loader.assign([])

    assert bench.states == {}


async def test_a_load_that_fails_after_it_was_given_up_leaves_no_row(bench: Bench) -> None:
    bench.engine.failures["load a"] = 1
    bench.engine.goes_on.clear()
    bench.loader.assign([bench.wanted("a")])
    await bench.until(lambda: bench.states == {"a": "loading"})

    bench.loader.assign([])
    bench.engine.goes_on.set()

    await bench.until(lambda: bench.states == {})


async def test_a_load_that_succeeds_after_it_was_given_up_is_unloaded(bench: Bench) -> None:
    bench.engine.goes_on.clear()
    bench.loader.assign([bench.wanted("a")])
    await bench.until(lambda: bench.states == {"a": "loading"})

    bench.loader.assign([])
    bench.engine.goes_on.set()
    await bench.until(lambda: bench.states == {})

    assert bench.engine.calls == ["load a", "unload a"]


async def test_an_engine_that_does_not_unload_ends_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with running_bench(bench) as run:
        bench.loader.assign([bench.wanted("a")])
        await bench.until(lambda: bench.states == {"a": "loaded"})
        bench.engine.failures["unload a"] = 1

        bench.loader.assign([])

        with pytest.raises(TimeoutError, match="the engine doesn't unload adapter a: out of memory"):
            await asyncio.wait_for(asyncio.shield(run), PATIENCE_S)
        assert bench.states == {"a": "unloading"}


@pytest.mark.parametrize("running", [0, 1])
async def test_an_engine_that_unloads_for_long_is_stuck_if_it_has_no_requests(tmp_path: Path, running: int) -> None:
    """SGLang unloads once the adapter's last request is over: an answer may be written for many minutes."""
    bench = Bench(tmp_path, unload_s=0.001)
    async with running_bench(bench) as run:
        bench.loader.assign([bench.wanted("a")])
        await bench.until(lambda: bench.states == {"a": "loaded"})
        bench.engine.running = running
        bench.engine.goes_on.clear()

        bench.loader.assign([])
        await bench.until(lambda: bench.states == {"a": "unloading"})

        if not running:
            with pytest.raises(TimeoutError, match="has no requests and doesn't unload adapter a"):
                await asyncio.wait_for(asyncio.shield(run), PATIENCE_S)
            return
        looks = bench.engine.num_looks
        async with asyncio.timeout(PATIENCE_S):
            while bench.engine.num_looks < looks + 5:  # noqa: ASYNC110  # the fake tells nobody
                await asyncio.sleep(0.001)
        assert bench.states == {"a": "unloading"}
        bench.engine.goes_on.set()
        await bench.until(lambda: bench.states == {})
        assert bench.engine.calls == ["load a", "unload a"]


async def test_a_load_whose_answer_is_lost_heals(bench: Bench) -> None:
    bench.engine.lost = {"a"}
    bench.loader.assign([bench.wanted("a")])

    await bench.until(lambda: bench.states == {"a": "loaded"})

    assert bench.engine.loaded.keys() == {"a"}


async def test_a_load_whose_answer_is_lost_leaves_nothing_once_it_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_BACKOFF_S", (3600.0,))
    bench.engine.lost = {"a"}
    bench.loader.assign([bench.wanted("a")])
    await bench.until(lambda: "a failed" in bench.told)

    bench.loader.assign([bench.wanted("b")])
    await bench.until(lambda: bench.states == {"b": "loaded"})

    assert bench.engine.loaded.keys() == {"b"}


@pytest.mark.parametrize("num_steps", range(6))
async def test_the_run_ends_when_it_is_cancelled_though_it_is_told_something(tmp_path: Path, num_steps: int) -> None:
    bench = Bench(tmp_path)
    async with running_bench(bench) as run:
        for _ in range(5):
            await asyncio.sleep(0)
        bench.loader.assign([])
        for _ in range(num_steps):
            await asyncio.sleep(0)

        run.cancel()

        assert (await asyncio.wait({run}, timeout=0.5))[0]
