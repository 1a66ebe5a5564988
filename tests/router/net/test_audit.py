"""Probes of an audit: a difference counts once whatever was lost on the wire has had its time to come again."""

from __future__ import annotations

import asyncio

import pytest
import zmq.asyncio

from router.decision import RouteRequest
from router.ids import SourceId
from router.net.audit import Auditor, Probe
from tests.router.fleet import PAGE, Fleet, hashes, report, request, source
from tests.router.net.virtual_time import virtual_time

W0 = source("w0")


async def probed(
    fleet: Fleet, held: int, *, removed_s: float | None = None, stored_s: float | None = None
) -> Probe | None:
    """A probe of an engine that holds so many pages, and whose batch about that comes so late."""

    async def ask_engine(_source: SourceId, asked: RouteRequest) -> int:
        loop = asyncio.get_running_loop()
        if stored_s is not None:
            loop.call_later(stored_s, fleet.store, W0, hashes()[:held])
        if removed_s is not None:
            gone = {"type": "BlockRemoved", "block_hashes": hashes()[held:2], "medium": "GPU"}
            loop.call_later(removed_s, fleet.publish, W0, gone)
        return min(held * PAGE, (asked.num_tokens - 1) // PAGE * PAGE)

    with zmq.asyncio.Context() as context:
        return await Auditor(fleet.core, context, ask_engine=ask_engine, samples=[])._probe(W0, request())


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.start(report("w0"))
    return fleet


@virtual_time
async def test_what_was_stored_and_is_heard_late_is_no_difference(fleet: Fleet) -> None:
    assert await probed(fleet, 1, stored_s=3.0) == Probe(2 * PAGE + 1, PAGE, PAGE)


@virtual_time
async def test_what_was_removed_and_is_heard_late_is_no_difference(fleet: Fleet) -> None:
    fleet.store(W0, hashes()[:2])
    assert await probed(fleet, 1, removed_s=3.0) == Probe(2 * PAGE + 1, PAGE, PAGE)


@virtual_time
@pytest.mark.parametrize(("known", "held"), [(0, 1), (2, 1)])
async def test_what_stays_different_is_told(fleet: Fleet, known: int, held: int) -> None:
    if known:
        fleet.store(W0, hashes()[:known])
    found = await probed(fleet, held)
    assert found is not None
    assert (found.predicted, found.actual) == (known * PAGE, held * PAGE)
