"""What live engines put on the wire, read without the product's own decoder."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest

from actors.engine.identity import content_id, lora_id
from router.hashing import Namespace, block_hashes
from router.ids import SourceId
from tests.integration.asking import ask, noise
from tests.integration.conftest import REPLAY_BUFFER
from tests.integration.event_tap import EventTap, barrier, tapped
from tests.integration.local_fleet import ADAPTERS, PAGE, SERVED, LocalFleet

pytestmark = pytest.mark.engine

NUM_PAGES = 6
TEXT = noise(random.Random(11), NUM_PAGES * PAGE + 5)
TOKENS = list(TEXT.encode())
MODELS = {None: SERVED, **{name: f"{SERVED}:{name}" for name in ADAPTERS}}

Taps = Mapping[SourceId, EventTap]


@pytest.fixture(scope="module")
def taps(fleet: LocalFleet) -> Iterator[Taps]:
    """Taps that heard the same prompt under every model name from each engine, asked directly."""
    with tapped(fleet) as taps:
        for source, tap in taps.items():
            with fleet.engine(source.worker_id) as engine:
                for model in MODELS.values():
                    ask(engine, model=model, prompt=TEXT, max_tokens=1, cache_salt="")
                ask(engine, prompt=TEXT, max_tokens=1, cache_salt="s", extra_key="k")
            barrier(fleet, source, tap)
        yield taps


def hashes_of(stores: list[dict[str, Any]]) -> list[int]:
    """Hashes of a chain of store events, in order."""
    return [h for event in stores for h in event["block_hashes"]][:NUM_PAGES]


def stored_as(tap: EventTap, adapter: str | None, salt: str | None = None) -> list[dict[str, Any]]:
    """Stores of TEXT under one adapter."""
    return [e for e in tap.stored(TOKENS) if e.get("lora_name") == adapter and e.get("cache_salt") == salt]


def namespace(fleet: LocalFleet, adapter: str | None) -> Namespace:
    """What the files of the adapter say that its blocks are hashed with."""
    if adapter is None:
        return Namespace()
    folder = fleet.model / "adapters" / adapter
    return Namespace.of(extra_key=None, lora_id=lora_id(adapter, content_id(folder)), cache_salt=None)


def test_batches_are_numbered_without_gaps_and_tagged_with_the_fleets_rank(taps: Taps) -> None:
    for source, tap in taps.items():
        batches = tap.read()
        assert {batch.dp_rank for batch in batches} == {source.dp_rank}
        assert {batch.topic for batch in batches} == {b""}
        assert all(after.seq == before.seq + 1 for before, after in pairwise(batches))
        assert all(after.ts >= before.ts for before, after in pairwise(batches))
    assert sorted(source.dp_rank for source in taps) == [0, 1]


def test_events_are_maps_of_the_known_types(taps: Taps) -> None:
    for tap in taps.values():
        for batch in tap.read():
            assert batch.events
            for event in batch.events:
                assert isinstance(event, dict)
                assert event["type"] in {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
                if event["type"] != "AllBlocksCleared":
                    assert event["medium"] == "GPU"
                    assert all(-(1 << 63) <= h < 1 << 63 for h in event["block_hashes"])


def test_the_replay_ring_holds_the_last_batches_as_they_were_sent(taps: Taps) -> None:
    for tap in taps.values():
        live = tap.read()
        replayed = tap.replay(0)
        assert len(replayed) == REPLAY_BUFFER
        assert replayed[-len(live) :] == live[-REPLAY_BUFFER:]
        assert tap.replay(live[-1].seq) == live[-1:]
        assert tap.replay(live[-1].seq + 1) == []


@pytest.mark.parametrize("adapter", MODELS)
def test_published_hashes_are_those_we_compute_on_every_worker(
    fleet: LocalFleet, taps: Taps, adapter: str | None
) -> None:
    expected = block_hashes(TOKENS, PAGE, namespace(fleet, adapter))
    assert len(expected) == NUM_PAGES
    for tap in taps.values():
        stores = stored_as(tap, adapter)
        assert hashes_of(stores) == expected
        assert [token for e in stores for token in e["token_ids"]][: NUM_PAGES * PAGE] == TOKENS[: NUM_PAGES * PAGE]
        assert all(e["block_size"] == PAGE for e in stores)
        assert stores[0].get("parent_block_hash") is None


def test_adapter_stores_carry_their_name_and_base_stores_none(taps: Taps) -> None:
    for tap in taps.values():
        stores = tap.stored(TOKENS)
        assert {e.get("lora_name") for e in stores} == set(MODELS)
        assert not any(
            "lora_name" in e for e in stores if e["block_hashes"][0] in block_hashes(TOKENS, PAGE, Namespace())
        )


def test_base_and_adapters_share_no_hash(taps: Taps) -> None:
    for tap in taps.values():
        each = [set(hashes_of(stored_as(tap, adapter))) for adapter in MODELS]
        assert len(set.union(*each)) == NUM_PAGES * len(MODELS)


def test_salt_and_key_are_hashed_in_and_only_the_salt_is_told(taps: Taps) -> None:
    expected = block_hashes(TOKENS, PAGE, Namespace.of(extra_key="k", lora_id=None, cache_salt="s"))
    for tap in taps.values():
        stores = stored_as(tap, None, salt="s")
        assert hashes_of(stores) == expected
        assert not any("extra_key" in e for e in stores)
