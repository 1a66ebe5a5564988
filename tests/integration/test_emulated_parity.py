"""An emulated engine beside a real one, asked the same: the same tokens reused, the same blocks held, hash for hash."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from router.ids import SourceId
from tests.integration.asking import ask
from tests.integration.background_loop import poll
from tests.integration.emulated_fleet import EmulatedFleet
from tests.integration.event_tap import EventTap, tapped
from tests.integration.local_fleet import ADAPTERS, CACHE_TOKENS, PAGE, SERVED, LocalFleet

pytestmark = pytest.mark.engine

WORKER: Final = "w0"
MODELS: Final = (SERVED, *(f"{SERVED}:{name}" for name in ADAPTERS))
KEYS: Final[tuple[dict[str, str], ...]] = ({}, {}, {"cache_salt": "s"}, {"extra_key": "k"}, {"extra_key": "s"})
ARRIVE_S: Final = 5.0
"""Events come on a connection of their own, soon."""


@pytest.fixture(scope="module")
def twin(tiny_model: Path) -> Iterator[EmulatedFleet]:
    """One emulated engine with what each of the shared fleet's has: adapters, pages, memory."""
    fleet = EmulatedFleet(tiny_model, num_workers=1)
    fleet.start()
    yield fleet
    fleet.stop()


@dataclass
class Held:
    """Blocks of one engine, by what it has published since it was empty."""

    tap: EventTap
    hashes: set[int] = field(default_factory=set)
    stored: int = 0
    removed: int = 0
    cleared: bool = False
    """From then on it is known what is held."""
    _read: int = 0

    def refresh(self) -> set[int]:
        """Take what has come."""
        batches = self.tap.read()
        for batch in batches[self._read :]:
            for event in batch.events:
                self._apply(event)
        self._read = len(batches)
        return self.hashes

    def is_empty(self) -> bool:
        """Whether it holds nothing now."""
        return not self.refresh() and self.cleared

    def _apply(self, event: dict[str, Any]) -> None:
        hashes = [int(one) for one in event.get("block_hashes", ())]
        if event["type"] == "BlockStored":
            self.stored += len(hashes)
            self.hashes.update(hashes)
        elif event["type"] == "BlockRemoved":
            self.removed += len(hashes)
            assert not self.cleared or self.hashes.issuperset(hashes), "removed what it didn't hold"
            self.hashes.difference_update(hashes)
        else:
            assert event["type"] == "AllBlocksCleared", event
            self.hashes.clear()
            self.cleared = True


@dataclass
class Pair:
    """The two engines, side by side. Requests go to one after the other."""

    clients: tuple[httpx.Client, httpx.Client]
    held: tuple[Held, Held]

    def empty(self) -> None:
        """Flush both, and wait until both have said so."""
        for client, held in zip(self.clients, self.held, strict=True):
            ask(client, prompt=[5] * (2 * PAGE), max_tokens=1)  # so that there is something to be cleared
            poll(held.refresh, what="something held")
            assert client.post("/flush_cache", params={"timeout": 10}).status_code == 200
            poll(held.is_empty, what="empty")
            held.stored = held.removed = 0

    def ask(self, **fields: Any) -> tuple[int, int]:
        """Cached tokens as each says; once what they hold has come to be the same, which it must."""
        cached = [ask(client, max_tokens=1, **fields).cached for client in self.clients]
        try:
            poll(self.same, within_s=ARRIVE_S)
        except AssertionError:
            real, emulated = (held.refresh() for held in self.held)
            pytest.fail(
                f"only real: {len(real - emulated)} of {len(real)}, only emulated: {len(emulated - real)} of "
                f"{len(emulated)}, removed so far: {[held.removed for held in self.held]}, cached: {cached}"
            )
        return cached[0], cached[1]

    def same(self) -> bool:
        """Whether both hold the same now."""
        real, emulated = (held.refresh() for held in self.held)
        return real == emulated


@pytest.fixture
def pair(fleet: LocalFleet, twin: EmulatedFleet) -> Iterator[Pair]:
    fleet.settle()
    with (
        fleet.engine(WORKER) as real,
        twin.engine(WORKER) as emulated,
        tapped(fleet) as real_taps,
        tapped(twin) as taps,
    ):
        pair = Pair((real, emulated), (Held(_tap_of(real_taps)), Held(_tap_of(taps))))
        pair.empty()
        yield pair
        pair.empty()
    fleet.settle()


def _tap_of(taps: Any) -> EventTap:
    source: SourceId
    for source, tap in taps.items():
        if source.worker_id == WORKER:
            assert isinstance(tap, EventTap)
            return tap
    raise AssertionError(f"no {WORKER} in {list(taps)}")


def prompts(rng: random.Random, num: int, *, longest: int) -> Iterator[list[int]]:
    """Token ids; most go on from what an earlier one began with."""
    made: list[list[int]] = []
    for _ in range(num):
        begin = rng.choice(made)[: rng.randrange(longest)] if made and rng.random() < 0.7 else []
        more = [rng.randrange(3, 250) for _ in range(rng.choice((1, 7, PAGE, 2 * PAGE, 3 * PAGE + 5)))]
        made.append((begin + more)[:longest])
        yield made[-1]


def test_until_memory_is_full_the_same_is_reused_and_held(pair: Pair) -> None:
    rng = random.Random(71)
    seen: list[int] = []
    for tokens in prompts(rng, 250, longest=24 * PAGE):
        if (len(pair.held[0].hashes) + 2) * PAGE + len(tokens) > CACHE_TOKENS:
            break
        real, emulated = pair.ask(model=rng.choice(MODELS), prompt=tokens, **rng.choice(KEYS))
        assert real == emulated, (seen, len(tokens))
        seen.append(real)
    assert len(pair.held[0].hashes) * PAGE > CACHE_TOKENS * 2 // 3, "memory is far from full"
    assert pair.held[0].removed == pair.held[1].removed == 0
    assert any(seen), "nothing was reused: the test proves little"


def test_what_is_evicted_is_evicted_alike(pair: Pair) -> None:
    """Until each has given up as much as its memory holds."""
    rng = random.Random(72)
    for i, tokens in enumerate(prompts(rng, 250, longest=24 * PAGE)):
        real, emulated = pair.ask(model=rng.choice(MODELS), prompt=tokens, **rng.choice(KEYS))
        assert real == emulated, (i, real, emulated, len(tokens))
        assert pair.held[0].removed == pair.held[1].removed, i
        if pair.held[0].removed > CACHE_TOKENS // PAGE:
            break
    assert pair.held[0].removed > CACHE_TOKENS // PAGE // 2, "too little was asked: the test proves little"
