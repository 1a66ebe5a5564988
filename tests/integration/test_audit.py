"""The audit finds what is wrong, says it, and the router mends it; a mirror that lost events heals by a flush."""

from __future__ import annotations

import random
from typing import Any

import httpx
import msgspec
import pytest

from actors.mirror import Mirror
from actors.probe import attest_engine
from router.attestation import HashForm
from router.events import Removed, Stored
from router.hashing import Namespace, block_hashes
from router.ids import SourceId
from router.index import BlockIndex
from router.ingest import SourceState
from tests.integration.asking import COMPLETIONS, ask, noise
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.local_fleet import PAGE, SERVED, LocalFleet

pytestmark = pytest.mark.engine

GHOST = 0x1234


def audit(client: httpx.Client) -> dict[str, Any]:
    return dict(client.post("/loray/audit", timeout=SETTLE_S).json())


def of(found: dict[str, Any], source: SourceId) -> dict[str, Any]:
    return next(one for one in found["sources"] if (one["worker"], one["dp_rank"]) == (source[0], source[2]))


def raw(*hashes: int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(list(hashes)))


def store(index: BlockIndex, source: SourceId, *hashes: int) -> None:
    index.apply(source, [Stored(raw(*hashes), "GPU")])


def remove(index: BlockIndex, source: SourceId, *hashes: int) -> None:
    index.apply(source, [Removed(raw(*hashes), "GPU")])


def served(fleet: LocalFleet, client: httpx.Client, rng: random.Random) -> tuple[SourceId, list[int]]:
    """A prompt of four pages and a rest that has just been served: where, and its hashes."""
    text = noise(rng, 4 * PAGE + 5)
    worker = ask(client, COMPLETIONS, model=SERVED, prompt=text).worker
    fleet.settle()
    source = next(source for source in fleet.sources() if source.worker_id == worker)
    return source, block_hashes(list(text.encode()), PAGE, Namespace())


def test_a_whole_fleet_is_clean_and_the_engines_agree(fleet: LocalFleet, client: httpx.Client) -> None:
    served(fleet, client, random.Random(70))
    found = audit(client)
    assert (found["clean"], found["ghosts"], found["missing"]) == (True, 0, 0), found
    assert len(found["sources"]) == len(fleet.sources())
    probes = [probe for source in found["sources"] for probe in source["probes"]]
    assert probes
    assert [probe["actual"] for probe in probes] == [probe["predicted"] for probe in probes]
    text = client.get("/metrics").text
    assert 'loray_audit_ghosts{dp_rank="0",worker="w0"} 0.0' in text
    assert 'loray_audits_total{dp_rank="0",verdict="clean",worker="w0"}' in text


def test_ghosts_and_missing_blocks_are_counted_and_mended(fleet: LocalFleet, client: httpx.Client) -> None:
    source, hashes = served(fleet, client, random.Random(71))
    index = fleet.core.ingest.index

    def damage() -> None:
        store(index, source, GHOST, hashes[0])  # one that nobody has, and one copy too many
        remove(index, source, hashes[1], hashes[2], hashes[3])

    fleet.call(damage)
    one = of(audit(client), source)
    assert (one["verdict"], one["ghosts"], one["missing"]) == ("dirty", 2, 3), one
    fleet.wait_whole()
    assert poll(lambda: audit(client)["clean"], what="mended")


def test_a_mirror_that_is_not_what_its_engine_holds_is_found_by_asking(fleet: LocalFleet, client: httpx.Client) -> None:
    source, hashes = served(fleet, client, random.Random(72))
    mirror = fleet.workers[source.worker_id].life.mirror
    assert mirror is not None

    def damage() -> None:
        remove(fleet.core.ingest.index, source, hashes[3])
        remove(mirror._ingest.index, source, hashes[3])
        fleet.router._samples.clear()
        fleet.router._samples.append(wanted)

    def mend() -> None:
        store(fleet.core.ingest.index, source, hashes[3])
        store(mirror._ingest.index, source, hashes[3])

    wanted = fleet.call(lambda: fleet.router._samples[-1])
    fleet.call(damage)
    one = of(audit(client), source)
    fleet.call(mend)
    assert (one["verdict"], one["ghosts"], one["missing"]) == ("dirty", 0, 0), one
    assert one["probes"] == [{"tokens": 4 * PAGE + 1, "predicted": 3 * PAGE, "actual": 4 * PAGE}]
    fleet.wait_whole()
    assert poll(lambda: audit(client)["clean"], what="mended")


def test_a_mirror_that_lost_events_for_good_heals_by_a_flush(fleet: LocalFleet, client: httpx.Client) -> None:
    source, _ = served(fleet, client, random.Random(73))
    mirror = fleet.workers[source.worker_id].life.mirror
    assert mirror is not None
    fleet.call(lambda: mirror._ingest.adopt(source, now_s=0.0))
    assert fleet.call(mirror.has_hole)
    fleet.wait(lambda: not mirror.has_hole(), what="the engine's cache was flushed")
    fleet.settle()
    assert fleet.call(lambda: fleet.core.ingest.index.num_blocks(source)) == 0
    assert fleet.call(lambda: fleet.core.ingest.state(source)) is SourceState.EXACT
    assert audit(client)["clean"]


def test_an_engine_that_hashes_otherwise_is_found_out_when_it_registers(
    fleet: LocalFleet, client: httpx.Client
) -> None:
    source = fleet.sources()[0]
    rank = fleet.ranks()[source]
    engine = fleet.workers[source.worker_id].life.client
    assert engine is not None

    async def attest(form: HashForm) -> str:
        mirror = Mirror([source], [rank], form)
        try:
            return await attest_engine(engine, mirror, form)
        finally:
            await mirror.close()

    assert fleet.run(attest(HashForm(PAGE))) == ""
    assert f"its events say page size {PAGE}, it was registered with {2 * PAGE}" in fleet.run(
        attest(HashForm(2 * PAGE))
    )
    fleet.settle()
