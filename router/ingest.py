"""The write path: event batches of all sources, in order and exactly once, into the block index.

A source is `exact` only while every batch of its life is applied; otherwise nothing is predicted for it.
Called by RouterCore (and by a worker's mirror, with its one engine); returns what to ask of the outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from router.cursor import Advance, Cursor, SeqPayload, Wish
from router.effects import Effect, RequestReplay, RequestSnapshot
from router.errors import EventDecodeError
from router.events import Tier, decode_batch
from router.ids import SourceId
from router.index import BlockIndex, Tally
from router.table import Hashes


class SourceState(StrEnum):
    """How far a source's part of the index can be believed."""

    SYNCING = "syncing"
    EXACT = "exact"
    UNVERIFIED = "unverified"


@dataclass(slots=True)
class SourceStats(Tally):
    """Counters of one source since it was added."""

    batches: int = 0
    events: int = 0
    lag_s: float = 0.0
    """Age of the last live batch when it was applied, by the two machines' clocks."""


@dataclass(slots=True)
class _Source:
    column: int
    cursor: Cursor = field(default_factory=Cursor)
    stats: SourceStats = field(default_factory=SourceStats)
    #: why the source can't be trusted at all, or empty
    fault: str = ""


class EventIngest:
    """Cursors and blocks of all sources. One loop owns it."""

    def __init__(self, *, min_blocks: int = 0) -> None:
        self.index = BlockIndex(min_blocks=min_blocks)
        self._sources: dict[SourceId, _Source] = {}

    def __contains__(self, source: SourceId) -> bool:
        return source in self._sources

    def add(self, source: SourceId) -> int:
        """Start following `source` from nothing; returns its column."""
        column = self.index.add(source)
        self._sources[source] = _Source(column)
        return column

    def discard(self, source: SourceId) -> None:
        """Forget the source with all its blocks; what still arrives of it is ignored."""
        if self._sources.pop(source, None) is not None:
            self.index.discard(source)

    def column(self, source: SourceId) -> int:
        """The source's column in the index."""
        return self._sources[source].column

    def state(self, source: SourceId) -> SourceState:
        """Whether predictions hold for the source."""
        entry = self._sources[source]
        if entry.fault:
            return SourceState.UNVERIFIED
        return SourceState.EXACT if entry.cursor.pending is None else SourceState.SYNCING

    def fault(self, source: SourceId) -> str:
        """Why an unverified source is that; empty otherwise."""
        return self._sources[source].fault

    def stats(self, source: SourceId) -> SourceStats:
        """Counters, live."""
        return self._sources[source].stats

    def cursor(self, source: SourceId) -> Cursor:
        """Position in the stream, to read."""
        return self._sources[source].cursor

    def live(self, source: SourceId, batch: SeqPayload, *, now_s: float) -> list[Effect]:
        """A batch from the subscription. `now_s`: wall clock, as the engine's `ts`."""
        entry = self._sources.get(source)
        if entry is None:
            return []
        if entry.cursor.accept(batch.seq):  # the common case, without ceremony
            try:
                self._apply(source, entry, batch, now_s)
            except EventDecodeError:
                entry.stats.bad += 1
                return self._advance(source, entry, entry.cursor.failed(), now_s)
            return []
        return self._advance(source, entry, entry.cursor.live(batch), now_s)

    def replayed(self, source: SourceId, batches: list[SeqPayload], *, now_s: float) -> list[Effect]:
        """The whole answer of a replay request."""
        entry = self._sources.get(source)
        return [] if entry is None else self._advance(source, entry, entry.cursor.replayed(batches), now_s)

    def replay_failed(self, source: SourceId) -> list[Effect]:
        """The replay socket didn't answer in time."""
        entry = self._sources.get(source)
        return [] if entry is None else self._advance(source, entry, entry.cursor.failed(), 0.0)

    def retry(self, source: SourceId) -> list[Effect]:
        """Neither replay nor snapshot could be had: try the replay again."""
        entry = self._sources.get(source)
        return [] if entry is None else self._advance(source, entry, entry.cursor.retried(), 0.0)

    def announced(self, source: SourceId, last_seq: int) -> list[Effect]:
        """A heartbeat names the last batch published."""
        entry = self._sources.get(source)
        return [] if entry is None else self._advance(source, entry, entry.cursor.announced(last_seq), 0.0)

    def snapshot(self, source: SourceId, last_seq: int, blocks: Mapping[Tier, Hashes], *, now_s: float) -> list[Effect]:
        """Replace all that is known of the source by `blocks` (a hash as often as it was stored).

        They are the state after batch `last_seq`; -1 for before the first.
        """
        entry = self._sources.get(source)
        if entry is None:
            return []
        self.index.restore(source, blocks)
        return self._advance(source, entry, entry.cursor.jumped(last_seq), now_s)

    def condemn(self, source: SourceId, fault: str) -> None:
        """Never predict for this source: what it publishes isn't what we would compute."""
        if source in self._sources:
            self._sources[source].fault = fault

    def check(self) -> None:
        """Invariants; for tests."""
        self.index.check()
        for source, entry in self._sources.items():
            assert self.index.add(source) == entry.column

    def _advance(self, source: SourceId, entry: _Source, advance: Advance, now_s: float) -> list[Effect]:
        for batch in advance.apply:
            try:
                self._apply(source, entry, batch, now_s)
            except EventDecodeError:
                entry.stats.bad += 1
                advance.wish = entry.cursor.failed().wish
        if advance.wish is None:
            return []
        if advance.wish is Wish.REPLAY:
            return [RequestReplay(source, entry.cursor.next_seq)]
        return [RequestSnapshot(source)]

    def _apply(self, source: SourceId, entry: _Source, item: SeqPayload, now_s: float) -> None:
        batch = decode_batch(item.payload)
        if batch.dp_rank is not None and batch.dp_rank != source.dp_rank:
            self.condemn(source, f"batches are tagged dp_rank {batch.dp_rank}, expected {source.dp_rank}")
        stats = entry.stats
        self.index.apply(source, batch.events, stats)
        stats.batches += 1
        stats.events += len(batch.events)
        stats.bad += batch.num_bad
        stats.lag_s = now_s - batch.ts
