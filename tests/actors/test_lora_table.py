"""Claims of actors/lora_table.py: the whole truth at a version, workers replaceable, restarts quiet until whole."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from actors import lora_table
from actors.lora_table import LoraTable
from router.ids import Incarnation, LoraId, WorkerId
from router.reports import AdapterState, Holding, TableView

W0, W1 = WorkerId("w0"), WorkerId("w1")


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_table, "SETTLE_S", 0.0)


def _row(worker: WorkerId, life: str, name: str) -> Holding:
    return Holding(
        worker_id=worker,
        incarnation=Incarnation(life),
        lora_id=LoraId(f"id-{name}"),
        name=name,
        content_id="c",
        state=AdapterState.LOADED,
    )


def _decoded(raw: bytes) -> TableView:
    return msgspec.msgpack.decode(raw, type=TableView)


async def test_view_aggregates_all_workers() -> None:
    table = LoraTable(["b", "a"])
    rows = [_row(W0, "x", "a"), _row(W1, "y", "a"), _row(W1, "y", "b")]
    await table.tell(W1, Incarnation("y"), rows[1:])
    await table.tell(W0, Incarnation("x"), rows[:1])

    view = table.view()

    assert view.names == ("a", "b")
    assert view.holdings == tuple(rows)
    assert view.version == 2


async def test_telling_the_same_again_is_no_new_version() -> None:
    table = LoraTable(["a"])
    for _ in range(3):
        await table.tell(W0, Incarnation("x"), [_row(W0, "x", "a")])

    assert table.view().version == 1


async def test_a_new_life_replaces_the_old_one() -> None:
    table = LoraTable(["a"])
    await table.tell(W0, Incarnation("x"), [_row(W0, "x", "a")])
    await table.tell(W0, Incarnation("y"), [])

    assert table.view().holdings == ()


async def test_a_forgotten_worker_holds_nothing() -> None:
    table = LoraTable(["a"])
    await table.tell(W0, Incarnation("x"), [_row(W0, "x", "a")])
    await table.forget(W0)
    await table.forget(W0)

    assert (table.view().holdings, table.view().version) == ((), 2)


async def test_a_waiting_router_hears_the_next_version() -> None:
    table = LoraTable(["a"])
    first = _decoded(await table.wait_view("", -1, 5.0))
    waiting = asyncio.ensure_future(table.wait_view(first.epoch, first.version, 60.0))
    await asyncio.sleep(0)
    assert not waiting.done()

    await table.tell(W0, Incarnation("x"), [_row(W0, "x", "a")])

    assert _decoded(await asyncio.wait_for(waiting, 5.0)).version == first.version + 1


async def test_a_restarted_table_has_another_epoch_so_that_its_lower_version_counts() -> None:
    old, new = LoraTable(["a"]), LoraTable(["a"])
    await old.tell(W0, Incarnation("x"), [_row(W0, "x", "a")])

    seen = _decoded(await asyncio.wait_for(new.wait_view(old.view().epoch, old.view().version, 60.0), 5.0))

    assert seen.epoch != old.view().epoch


async def test_a_young_table_waits_until_workers_have_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_table, "SETTLE_S", 0.2)
    table = LoraTable(["a"])
    waiting = asyncio.ensure_future(table.wait_view("", -1, 60.0))

    await table.tell(W0, Incarnation("x"), [_row(W0, "x", "a")])

    assert len(_decoded(await asyncio.wait_for(waiting, 5.0)).holdings) == 1
