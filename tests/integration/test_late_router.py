"""A router that joins a warm fleet, too late for the engines' replay rings."""

from __future__ import annotations

import random

import httpx
import pytest

from router.ids import SourceId
from tests.integration.asking import ask, noise
from tests.integration.conftest import REPLAY_BUFFER
from tests.integration.local_fleet import ADAPTERS, SERVED, LocalFleet

pytestmark = pytest.mark.engine


def test_a_late_router_becomes_exact_from_the_workers_snapshots(fleet: LocalFleet, client: httpx.Client) -> None:
    rng = random.Random(21)
    shared = [noise(rng, 70) for _ in range(6)]
    models = (SERVED, *ADAPTERS)
    for source in fleet.sources():  # straight to the engines, so that each one's ring overflows
        with fleet.engine(source.worker_id) as engine:
            for i in range(REPLAY_BUFFER + 2):
                model = models[i % 3]
                ask(
                    engine,
                    model=model if model == SERVED else f"{SERVED}:{model}",
                    prompt=shared[i % 6] + noise(rng, 20),
                )
    fleet.settle()
    with fleet.another_router() as (late, url):
        fleet.wait_whole(late)
        fleet.settle()
        mine, theirs = fleet.core.ingest, late._core.ingest

        def compare(source: SourceId) -> None:
            assert theirs.cursor(source).next_seq == mine.cursor(source).next_seq > REPLAY_BUFFER
            assert theirs.stats(source).batches < theirs.cursor(source).next_seq, "nothing came by snapshot"
            assert theirs.index.num_blocks(source) > 0
            assert sorted(theirs.index.hashes(source)) == sorted(mine.index.hashes(source))
            exported = {tier: sorted(held) for tier, held in theirs.index.export(source).items()}
            assert exported == {tier: sorted(held) for tier, held in mine.index.export(source).items()}

        for source in fleet.sources():
            fleet.call(lambda source=source: compare(source))
        with fleet.client(url) as other:
            for i in range(12):
                asked = {"model": models[i % 3], "prompt": shared[i % 6] + noise(rng, 20)}
                answers = [ask(c, **asked) for c in ((other, client) if i % 2 else (client, other))]
                assert [a.predicted for a in answers] == [a.cached for a in answers]
                assert answers[0].cached >= 64
        fleet.settle()
        for source in fleet.sources():
            fleet.call(lambda source=source: compare(source))
        fleet.check(late)
