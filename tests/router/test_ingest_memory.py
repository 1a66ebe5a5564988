"""The index keeps to its limit at every moment: the largest source is set aside and says so, the others stay exact."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import table as table_module
from router.budget import Budget
from router.cursor import SeqPayload
from router.effects import Effect, RequestReplay, RequestSnapshot
from router.events import Tier
from router.ids import SourceId
from router.ingest import EventIngest, SourceState
from router.table import Hashes, pack
from tests.router.publisher import CLEARED, REMOVED, STORED, Publisher, blocks, exported, source

LIMIT = 60_000
"""Room for a table of 1,638 blocks; the next larger one takes 65 kB."""
W0, W1 = source(0), source(1)


@pytest.fixture(autouse=True)
def sizes() -> Iterator[list[int]]:
    """What indexes have taken, after every allocation; never more than their limit."""
    sizes: list[int] = []
    take = Budget.take

    def watch(self: Budget, size_bytes: int) -> None:
        take(self, size_bytes)
        sizes.append(self.used_bytes)
        assert self.max_bytes is None or self.used_bytes <= self.max_bytes

    with patch.object(Budget, "take", watch):
        yield sizes


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def stored(start: int, count: int, tier: Tier = Tier.GPU) -> tuple[str, Tier, list[int]]:
    return STORED, tier, numbers(start, count)


class Fleet:
    """Sources that an ingest with a limit follows."""

    def __init__(self, max_bytes: int = LIMIT, *sizes: int) -> None:
        """`sizes`: blocks that each holds."""
        self.ingest = EventIngest(max_bytes=max_bytes)
        self.publishers = [Publisher(source(n)) for n in range(len(sizes))]
        for n, p in enumerate(self.publishers):
            self.ingest.add(p.source)
            p.publish(stored(10_000 * n, sizes[n]))
            assert self.ingest.replayed(p.source, p.log, now_s=2.0) == []

    def live(self, n: int, *events: tuple[str, Tier, list[int]]) -> list[Effect]:
        p = self.publishers[n]
        return self.ingest.live(p.source, p.publish(*events), now_s=2.0)

    def is_exact(self, n: int) -> bool:
        """It says that it is; then it had better be."""
        p = self.publishers[n]
        if self.ingest.state(p.source) is not SourceState.EXACT:
            return False
        assert exported(self.ingest, p.source) == p.held[-1]
        return True

    def settle(self, effects: list[Effect]) -> None:
        """Answer all requests honestly; a snapshot that finds no room is tried again by a replay."""
        while effects:
            effect = effects.pop(0)
            (p,) = [p for p in self.publishers if p.source == effect.source]
            if isinstance(effect, RequestReplay):
                effects += self.ingest.replayed(p.source, p.log[effect.from_seq :], now_s=2.0)
                continue
            restore = self.ingest.restore_begins(p.source)
            parts = [{tier: hashes} for tier, hashes in blocks(p.held[-1]).items()] or [{}]
            if all(self.ingest.restoring(p.source, restore, part) for part in parts):
                effects += self.ingest.restored(p.source, restore, len(p.log) - 1, now_s=2.0)
            else:
                effects += self.ingest.retry(p.source)


def overfull() -> Fleet:
    """w0 is set aside with 1,000 blocks for w1's sake, which had 200 and wants 700; w2 has 50."""
    fleet = Fleet(LIMIT, 1000, 200, 50)
    assert fleet.live(1, stored(20_000, 500)) == [RequestSnapshot(W1)]
    return fleet


def test_largest_source_is_set_aside_and_says_which_limit_and_how_many_blocks() -> None:
    fleet = overfull()
    assert fleet.ingest.state(W0) is SourceState.UNVERIFIED
    assert "1000 blocks" in fleet.ingest.fault(W0)
    assert f"{LIMIT} bytes" in fleet.ingest.fault(W0)
    assert "router.max_index_mb" in fleet.ingest.fault(W0)
    assert exported(fleet.ingest, W0) == {}
    fleet.ingest.check()


def test_interrupted_source_is_exact_after_a_snapshot_and_the_others_all_along() -> None:
    fleet = overfull()
    assert (fleet.ingest.state(W1), fleet.is_exact(2)) == (SourceState.SYNCING, True)
    fleet.settle([RequestSnapshot(W1)])
    assert fleet.live(1, stored(500, 20)) == fleet.live(2, stored(500, 30)) == []
    assert [fleet.is_exact(n) for n in range(3)] == [False, True, True]
    fleet.ingest.check()


def test_interrupted_source_without_a_snapshot_starts_over() -> None:
    fleet = overfull()
    fleet.settle(fleet.ingest.retry(W1))
    assert fleet.is_exact(1)
    fleet.ingest.check()


def test_snapshot_that_finds_no_room_leaves_nothing_that_counts_as_exact() -> None:
    fleet = Fleet(LIMIT, 900, 100)
    assert fleet.ingest.replay_failed(W1) == [RequestSnapshot(W1)]
    restore = fleet.ingest.restore_begins(W1)
    big = {Tier.GPU: np.arange(50_000, 51_000, dtype=np.uint64)}
    assert fleet.ingest.restoring(W1, restore, {Tier.CPU: np.array([7], np.uint64)})
    assert not fleet.ingest.restoring(W1, restore, big)
    assert not fleet.ingest.restoring(W1, restore, {})
    assert fleet.ingest.restored(W1, restore, 5, now_s=2.0) == []
    fleet.settle(fleet.ingest.retry(W1))
    assert [fleet.is_exact(n) for n in range(2)] == [False, True]


def test_snapshot_of_a_source_that_is_set_aside_meanwhile_is_dropped() -> None:
    fleet = Fleet(LIMIT, 1000, 200)
    assert fleet.ingest.replay_failed(W0) == [RequestSnapshot(W0)]
    restore = fleet.ingest.restore_begins(W0)
    assert fleet.ingest.restoring(W0, restore, blocks(fleet.publishers[0].held[1]))
    assert fleet.live(1, stored(20_000, 500)) == [RequestSnapshot(W1)]
    assert not fleet.ingest.restoring(W0, restore, {Tier.GPU: np.array([7], np.uint64)})
    assert fleet.ingest.restored(W0, restore, 0, now_s=2.0) == []
    assert (fleet.ingest.state(W0), exported(fleet.ingest, W0)) == (SourceState.UNVERIFIED, {})
    fleet.ingest.check()


def test_blocks_stored_twice_count_against_the_limit_too() -> None:
    fleet = Fleet(LIMIT, 300)
    size_bytes = fleet.ingest.index.size_bytes
    assert fleet.live(0, stored(0, 300)) == []
    assert fleet.ingest.index.size_bytes >= size_bytes + 300 * 100  # a dict's entry, and two integers
    assert fleet.live(0, (REMOVED, Tier.GPU, numbers(0, 300))) == []
    assert (fleet.is_exact(0), fleet.ingest.index.size_bytes) == (True, size_bytes)
    fleet.live(0, stored(0, 300), stored(1000, 400), stored(1000, 400))
    assert (fleet.ingest.state(W0), exported(fleet.ingest, W0)) == (SourceState.UNVERIFIED, {})


def test_whatever_comes_of_a_source_set_aside_is_ignored() -> None:
    fleet = overfull()
    ingest, size_bytes = fleet.ingest, fleet.ingest.index.size_bytes
    assert fleet.live(0, stored(1, 5)) == ingest.announced(W0, 9) == ingest.replay_failed(W0) == []
    late = [SeqPayload(1, fleet.publishers[0].log[0].payload)]
    assert ingest.replaying(W0, late, now_s=2.0) == ingest.replayed(W0, late, now_s=2.0) == []
    assert ingest.retry(W0) == ingest.doubt(W0) == ingest.adopt(W0, now_s=2.0) == []
    assert ingest.snapshot(W0, 0, blocks(fleet.publishers[0].held[1]), now_s=2.0) == []
    assert (exported(ingest, W0), ingest.index.size_bytes) == ({}, size_bytes)
    assert ingest.state(W0) is SourceState.UNVERIFIED
    ingest.check()


def test_batches_behind_the_one_that_did_not_fit_are_not_applied() -> None:
    fleet = Fleet(LIMIT, 1000)
    p = fleet.publishers[0]
    p.publish(stored(2000, 999))
    p.publish(stored(5, 3))
    assert fleet.ingest.live(W0, p.log[2], now_s=2.0) == [RequestReplay(W0, 1)]
    assert fleet.ingest.replayed(W0, p.log[1:], now_s=2.0) == []
    assert (fleet.ingest.state(W0), exported(fleet.ingest, W0)) == (SourceState.UNVERIFIED, {})
    fleet.ingest.check()


def test_source_set_aside_is_taken_back_from_its_start_once_it_fits() -> None:
    fleet = overfull()
    fleet.settle([RequestSnapshot(W1)])
    assert fleet.ingest.readmit() == []
    fleet.live(0, stored(9000, 1))
    assert fleet.live(1, (CLEARED, Tier.GPU, [])) == []
    assert fleet.ingest.readmit() == [RequestReplay(W0, 0)]
    assert (fleet.ingest.state(W0), fleet.ingest.fault(W0)) == (SourceState.SYNCING, "")
    fleet.settle([RequestReplay(W0, 0)])
    assert [fleet.is_exact(n) for n in range(3)] == [True, True, True]
    assert fleet.ingest.readmit() == []


def test_table_that_finds_no_room_takes_no_memory() -> None:
    """65 sources: a new tier's table is made for 64 and then widened."""
    ingest = EventIngest(max_bytes=1025 * (16 + 8) + 1025 * (16 + 8) - 1)
    sources: list[SourceId] = [source(n) for n in range(65)]
    for of in sources:
        ingest.add(of)
        ingest.replayed(of, [], now_s=2.0)
    size_bytes = ingest.index.size_bytes
    for n, of in enumerate(sources[:3]):
        disk = Publisher(of).publish(stored(n, 1, Tier.DISK))
        ingest.live(of, disk, now_s=2.0)
        assert ingest.index.size_bytes == size_bytes


def test_a_million_blocks_stored_and_removed_leave_no_memory_taken(sizes: list[int]) -> None:
    ingest = EventIngest()
    ingest.add(W0)
    ingest.replayed(W0, [], now_s=2.0)
    before, per_batch = ingest.index.size_bytes, 50_000
    hashes = np.arange(1, 1_000_001, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)  # odd: all distinct

    def payload(kind: str, part: Hashes) -> bytes:
        event = {"type": kind, "block_hashes": msgspec.Raw(pack(part)), "medium": "GPU"}
        return msgspec.msgpack.encode([1.0, [event], 0])

    parts = [hashes[at : at + per_batch] for at in range(0, len(hashes), per_batch)]
    payloads = [payload(kind, part) for kind in (STORED, REMOVED) for part in parts]
    for seq, batch in enumerate(payloads):
        assert ingest.live(W0, SeqPayload(seq, batch), now_s=2.0) == []
        if seq == len(parts) - 1:
            assert ingest.index.num_blocks(W0) == len(hashes)
    assert ingest.index.num_blocks(W0) == ingest.stats(W0).missing == ingest.stats(W0).repeats == 0
    assert max(sizes) > 16 * len(hashes)
    assert before <= ingest.index.size_bytes <= 1.1 * before
    ingest.check()


STEPS = st.tuples(
    st.sampled_from(["live", "live", "live", "lost", "readmit"]),
    st.integers(0, 2),
    st.sampled_from([STORED, STORED, STORED, REMOVED, CLEARED]),
    st.sampled_from([Tier.GPU, Tier.GPU, Tier.CPU]),
    st.integers(0, 60),
    st.integers(1, 40),
)


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(st.lists(STEPS, max_size=30))
def test_limit_holds_and_what_is_called_exact_is(steps: list[tuple[str, int, str, Tier, int, int]]) -> None:
    with patch.object(table_module, "MIN_SLOTS", 8):
        fleet = Fleet(1600, 1, 1, 1)
        for step, n, kind, tier, start, count in steps:
            if step == "readmit":
                fleet.settle(fleet.ingest.readmit())
            elif step == "lost":
                fleet.publishers[n].publish((kind, tier, numbers(start, count)))
            else:
                fleet.settle(fleet.live(n, (kind, tier, numbers(start, count))))
            fleet.ingest.check()
            for p in fleet.publishers:
                state, next_seq = fleet.ingest.state(p.source), fleet.ingest.cursor(p.source).next_seq
                assert state is SourceState.EXACT or "set aside" in fleet.ingest.fault(p.source)
                assert state is not SourceState.EXACT or exported(fleet.ingest, p.source) == p.held[next_seq]
