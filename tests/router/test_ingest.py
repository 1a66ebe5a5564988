"""The write path holds of each source exactly what its engine holds, or says that it doesn't."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router import cursor as cursor_module
from router import table as table_module
from router.cursor import SeqPayload
from router.effects import Effect, RequestReplay, RequestSnapshot
from router.events import Tier
from router.ids import Incarnation, SourceId, WorkerId
from router.ingest import EventIngest, SourceState
from router.table import Hashes
from tests.router.publisher import CLEARED, REMOVED, STORED, Publisher, blocks, exported, random_batch, source

T = TypeVar("T", RequestReplay, RequestSnapshot)
W0 = source(0)


def ingest_of(p: Publisher, num_batches: int = 0) -> EventIngest:
    """An ingest that follows `p` and has applied its first batches."""
    ingest = EventIngest()
    ingest.add(p.source)
    assert ingest.replayed(p.source, p.log[:num_batches], now_s=2.0) == []
    return ingest


def stored(*hashes: int) -> tuple[str, Tier, list[int]]:
    return STORED, Tier.GPU, list(hashes)


def test_adopted_source_is_unverified_until_a_clear_and_holds_nothing_too_much() -> None:
    p = Publisher(W0)
    p.publish(stored(1, 2))
    ingest = ingest_of(p, 1)
    p.publish((REMOVED, Tier.GPU, [1]))
    ingest.live(W0, p.publish(stored(3, 3)), now_s=2.0)
    assert ingest.replay_failed(W0) == [RequestSnapshot(W0)]
    assert ingest.adopt(W0, now_s=2.0) == []
    assert (ingest.state(W0), exported(ingest, W0)) == (SourceState.UNVERIFIED, {Tier.GPU: Counter({3: 2})})
    assert "flushed" in ingest.fault(W0)
    ingest.live(W0, p.publish((REMOVED, Tier.GPU, [2, 3])), now_s=2.0)
    assert (ingest.state(W0), exported(ingest, W0)) == (SourceState.UNVERIFIED, p.held[-1])
    ingest.live(W0, p.publish(stored(4), (CLEARED, Tier.GPU, []), stored(5)), now_s=2.0)
    assert (ingest.state(W0), exported(ingest, W0), ingest.fault(W0)) == (SourceState.EXACT, p.held[-1], "")


def test_unreadable_batch_is_not_behind_us_until_it_is_made_up_for() -> None:
    p = Publisher(W0)
    ingest = ingest_of(p)
    assert ingest.live(W0, garbled(p.publish(stored(1))), now_s=2.0) == [RequestSnapshot(W0)]
    assert ingest.retry(W0) == [RequestReplay(W0, 0)]  # no snapshot could be had
    assert ingest.replayed(W0, p.log, now_s=2.0) == []
    assert (ingest.state(W0), exported(ingest, W0)) == (SourceState.EXACT, p.held[-1])


def test_source_is_not_exact_while_another_snapshot_comes_in_parts() -> None:
    p = Publisher(W0)
    p.publish(stored(1))
    ingest = ingest_of(p, 1)
    restore = ingest.restore_begins(W0)  # late, as the answer to a second request
    assert ingest.state(W0) is SourceState.SYNCING
    assert ingest.live(W0, p.publish(stored(2)), now_s=2.0) == []
    assert ingest.restoring(W0, restore, blocks(p.held[1]))
    assert ingest.restored(W0, restore, 0, now_s=2.0) == []
    assert (ingest.state(W0), exported(ingest, W0)) == (SourceState.EXACT, p.held[-1])


def test_snapshot_that_another_one_overtakes_disturbs_nothing() -> None:
    p = Publisher(W0)
    p.publish(stored(1))
    ingest = ingest_of(p, 1)
    ingest.replay_failed(W0)
    first = ingest.restore_begins(W0)
    second = ingest.restore_begins(W0)
    assert [ingest.restoring(W0, restore, blocks(p.held[1])) for restore in (first, second)] == [False, True]
    assert ingest.retry(W0) == []  # the first one's fetcher gives up; the second goes on
    assert ingest.restored(W0, second, 0, now_s=2.0) == []
    assert (ingest.state(W0), exported(ingest, W0)) == (SourceState.EXACT, p.held[-1])


def garbled(batch: SeqPayload) -> SeqPayload:
    return batch._replace(payload=batch.payload[:-1])


class Fetch(NamedTuple):
    """A snapshot that comes in parts."""

    restore: int
    last_seq: int
    parts: list[dict[Tier, Hashes]]


@dataclass
class Followed(Publisher):
    """A source, and what the network has under way for it."""

    #: requests without an answer; a replay that has begun asks for the rest
    asked: list[Effect] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    #: counters (clears, batches) when it was adopted, until a snapshot has come
    adopted: tuple[int, int] | None = None


RNG = random.Random(7)
BATCHES = [random_batch(RNG) for _ in range(200)]
N = st.integers(0, 5)
FATES = [["in time"], ["in time"] * 4, ["twice"], ["lost", "in time"], ["late", "in time", "in time"], ["garbled"]]


class LossyFleet(RuleBasedStateMachine):
    """Three sources on a network that loses, doubles, delays and garbles; every request gets one answer, some day."""

    @initialize(ring=st.integers(1, 6))
    def start(self, ring: int) -> None:
        self.small = ExitStack()
        self.small.enter_context(patch.object(cursor_module, "MAX_WAITING", 3))
        self.small.enter_context(patch.object(table_module, "MIN_SLOTS", 8))
        self.ring, self.lives = ring, 1
        self.ingest = EventIngest()
        self.late: list[tuple[SourceId, SeqPayload]] = []
        self.publishers: list[Followed] = []
        for of in (source(0), source(0, rank=1), source(1)):
            self.add(of)

    def add(self, of: SourceId) -> None:
        self.ingest.add(of)
        self.publishers.append(Followed(of, asked=[RequestReplay(of, 0)]))

    def act(self, of: SourceId, step: Callable[..., list[Effect]], *args: Any, **now: float) -> None:
        """Tell the ingest something of one source: no other changes, and what is asked for is under way."""
        others = [p.source for p in self.publishers if p.source != of]
        before = [(exported(self.ingest, other), self.ingest.state(other)) for other in others]
        effects = step(of, *args, **now)
        assert [(exported(self.ingest, other), self.ingest.state(other)) for other in others] == before
        for effect in effects:
            (asking,) = [p for p in self.publishers if p.source == effect.source == of]
            asking.asked.append(effect)

    def asking(self, kind: type[T]) -> list[tuple[Followed, T]]:
        return [(p, effect) for p in self.publishers for effect in p.asked if isinstance(effect, kind)]

    def take(self, kind: type[T], n: int) -> tuple[Followed, T]:
        """One of the open requests of a kind; it is being answered."""
        requests = self.asking(kind)
        p, effect = requests[n % len(requests)]
        p.asked.remove(effect)
        return p, effect

    @rule(n=N, first=st.integers(0, len(BATCHES) - 4), fates=st.sampled_from(FATES))
    def publish(self, n: int, first: int, fates: list[str]) -> None:
        p = self.publishers[max(0, n - 3)]
        for fate, events in zip(fates, BATCHES[first:], strict=False):
            batch = p.publish(*events)
            if fate == "late":
                self.late.append((p.source, batch))
            for _ in range({"late": 0, "lost": 0, "twice": 2}.get(fate, 1)):
                self.act(p.source, self.ingest.live, garbled(batch) if fate == "garbled" else batch, now_s=2.0)

    @rule(n=N, what=st.sampled_from(["late", "late", "announced", "announced", "disconnected", "restarted"]))
    def happen(self, n: int, what: str) -> None:
        p = self.publishers[max(0, n - 3)]
        if what == "late" and self.late:
            of, batch = self.late.pop(n % len(self.late))
            self.act(of, self.ingest.live, batch, now_s=2.0)
        elif what == "announced":
            self.act(p.source, self.ingest.announced, len(p.log) - 1)
        elif what == "disconnected":
            self.act(p.source, self.ingest.doubt)
        elif what == "restarted" and len(p.log) > 9:
            self.restart(p.source.worker_id)

    def restart(self, worker: WorkerId) -> None:
        """A new engine life; what was under way of the old one may still come."""
        self.lives += 1
        for old in [p for p in self.publishers if p.source.worker_id == worker]:
            self.publishers.remove(old)
            self.late += [(old.source, batch) for batch in old.log[-1:]]
            self.ingest.discard(old.source)
            self.add(old.source._replace(incarnation=Incarnation(f"i{self.lives}")))

    @precondition(lambda self: self.asking(RequestReplay))
    @rule(n=N, size=st.sampled_from([0, 1, 2, 9, 9]), bad=st.sampled_from([None, None, None, 0, 1]), lost=st.booleans())
    def answer_replay(self, n: int, size: int, bad: int | None, lost: bool) -> None:
        """A part of it, of which one batch may be lost or garbled; its socket may fall silent instead."""
        p, request = self.take(RequestReplay, n)
        start = max(request.from_seq, len(p.log) - self.ring)
        part = p.log[start : start + size]
        if bad is not None:
            part[bad : bad + 1] = [] if lost else map(garbled, part[bad : bad + 1])
        if not size:
            self.act(p.source, self.ingest.replay_failed)
        elif start + size < len(p.log):
            p.asked.append(RequestReplay(p.source, start + size))
            self.act(p.source, self.ingest.replaying, part, now_s=2.0)
        else:
            self.act(p.source, self.ingest.replayed, part, now_s=2.0)

    @precondition(lambda self: self.asking(RequestSnapshot) or self.fetching())
    @rule(n=N, how=st.sampled_from(["whole", "in parts", "in parts", "never", "nobody"]), lag=st.integers(0, 3))
    def answer_snapshot(self, n: int, how: str, lag: int) -> None:
        """Whole, or begin or go on with one in parts; or not at all, or there is nobody to ask."""
        if fetches := self.fetching()[n:] or self.fetching() * (not self.asking(RequestSnapshot)):
            return self.go_on(*fetches[0])
        p, _ = self.take(RequestSnapshot, n)
        last_seq = max(-1, len(p.log) - 1 - lag)
        held = blocks(p.held[last_seq + 1])
        if how == "never":
            self.act(p.source, self.ingest.retry)
        elif how == "nobody":
            p.adopted = (self.ingest.stats(p.source).cleared, self.ingest.stats(p.source).batches)
            self.act(p.source, self.ingest.adopt, now_s=2.0)
        elif how == "whole":
            p.adopted = None
            self.act(p.source, self.ingest.snapshot, last_seq, held, now_s=2.0)
        else:
            parts = [{tier: hashes} for tier, hashes in held.items()]
            p.fetches.append(Fetch(self.ingest.restore_begins(p.source), last_seq, parts or [{}]))

    def fetching(self) -> list[tuple[Followed, Fetch]]:
        return [(p, fetch) for p in self.publishers for fetch in p.fetches]

    def go_on(self, p: Followed, fetch: Fetch) -> None:
        going = self.ingest.restoring(p.source, fetch.restore, fetch.parts.pop(0))
        if going and fetch.parts:
            return
        p.fetches.remove(fetch)
        if going:
            p.adopted = None
            self.act(p.source, self.ingest.restored, fetch.restore, fetch.last_seq, now_s=2.0)
        else:
            self.act(p.source, self.ingest.retry)

    @invariant()
    def what_is_claimed_is_true(self) -> None:
        self.ingest.check()
        for p in self.publishers:
            state, next_seq = self.ingest.state(p.source), self.ingest.cursor(p.source).next_seq
            held, truth = exported(self.ingest, p.source), p.held[next_seq] if next_seq >= 0 else {}
            if state is SourceState.EXACT:
                assert held == truth
            elif state is SourceState.UNVERIFIED:
                assert p.adopted is not None
                assert all(held[tier] <= truth.get(tier, Counter()) for tier in held)
            if p.adopted is not None:
                stats = self.ingest.stats(p.source)
                has_hole = stats.cleared == p.adopted[0] and stats.batches - p.adopted[1] != next_seq
                assert not (has_hole and state is SourceState.EXACT)

    @invariant()
    def what_is_missing_is_asked_for(self) -> None:
        for p in self.publishers:
            assert self.ingest.cursor(p.source).pending is None or p.asked or p.fetches

    def teardown(self) -> None:
        """With honest answers and no loss every source comes home; one with a hole by a flush of its cache."""
        self.small.close()
        for _ in range(12):
            while fetches := self.fetching():
                self.go_on(*fetches[0])
            while self.asking(RequestReplay):
                self.answer_replay(0, 1 << 30, None, lost=False)
            while self.asking(RequestSnapshot):
                self.answer_snapshot(0, "whole", 0)
            for n in (0, 4, 5):
                self.happen(n, "announced")
        for p in self.publishers:
            if self.ingest.state(p.source) is SourceState.UNVERIFIED:
                self.act(p.source, self.ingest.live, p.publish((CLEARED, Tier.GPU, [])), now_s=2.0)
            assert (self.ingest.state(p.source), exported(self.ingest, p.source)) == (SourceState.EXACT, p.held[-1])
            assert self.ingest.cursor(p.source).next_seq == len(p.log)


TestLossyFleet = LossyFleet.TestCase
TestLossyFleet.settings = settings(
    deadline=None, max_examples=250, stateful_step_count=50, derandomize=True, database=None
)
