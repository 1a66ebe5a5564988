"""The write path: event batches of all sources, in order and exactly once, into the block index.

A source is `exact` only while every batch of its life is applied; otherwise nothing is predicted for it.
Called by RouterCore (and by a worker's mirror, with its one engine); returns what to ask of the outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.attestation import Attestor
from router.budget import IndexFullError
from router.cursor import Advance, Cursor, SeqPayload, Wish
from router.effects import Effect, RequestReplay, RequestSnapshot
from router.errors import EventDecodeError
from router.events import Tier, decode_batch
from router.ids import SourceId
from router.index import BlockIndex, Tally
from router.table import Hashes

Bools = NDArray[np.bool_]

MAX_JOURNAL: Final = 20_000
"""Batches that a journal keeps; one that would need more is given up."""


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
    attestor: Attestor | None
    cursor: Cursor = field(default_factory=Cursor)
    stats: SourceStats = field(default_factory=SourceStats)
    #: why the source can't be trusted at all, or empty
    fault: str = ""
    #: why the source is set aside and its batches are ignored, or empty; and how many blocks it had
    aside: str = ""
    aside_blocks: int = 0
    #: whether batches are missing that nobody can bring; a clear makes up for them
    hole: bool = False
    #: the last batch applied
    last: SeqPayload | None = None
    #: number of the snapshot that is being restored, 0 for none; nothing else is applied meanwhile
    restore: int = 0
    #: batches applied since `start_journal`
    journal: list[SeqPayload] | None = None


class EventIngest:
    """Cursors and blocks of all sources. One loop owns it."""

    def __init__(self, *, min_blocks: int = 0, max_bytes: int | None = None) -> None:
        """`max_bytes`: limit of the index; where it is reached, the source with the most blocks is set aside."""
        self.index = BlockIndex(min_blocks=min_blocks, max_bytes=max_bytes)
        self._sources: dict[SourceId, _Source] = {}
        self._num_restores = 0
        #: by column, whether its source's state is EXACT
        self.exact: Bools = np.zeros(0, bool)

    def __contains__(self, source: SourceId) -> bool:
        return source in self._sources

    def add(self, source: SourceId, attestor: Attestor | None = None) -> int:
        """Start following `source` from nothing; returns its column. Without an attestor its hashes are believed."""
        while True:
            try:
                column = self.index.add(source)
                break
            except IndexFullError:
                if not self._set_one_aside():
                    raise
        self._sources[source] = _Source(column, attestor)
        if column >= len(self.exact):
            self.exact = np.append(self.exact, np.zeros(column + 1 - len(self.exact), bool))
        self.exact[column] = False
        return column

    def discard(self, source: SourceId) -> None:
        """Forget the source with all its blocks; what still arrives of it is ignored."""
        entry = self._sources.pop(source, None)
        if entry is not None:
            self.exact[entry.column] = False
            self.index.discard(source)

    # -- to read -------------------------------------------------------------------------------------------------

    def column(self, source: SourceId) -> int:
        """The source's column in the index."""
        return self._sources[source].column

    def state(self, source: SourceId) -> SourceState:
        """Whether predictions hold for the source."""
        return _state(self._sources[source])

    def fault(self, source: SourceId) -> str:
        """Why an unverified source is that; empty otherwise."""
        entry = self._sources[source]
        attested = entry.attestor.fault if entry.attestor is not None else ""
        hole = "batches are missing that can't be had any more; exact again once its cache is flushed" * entry.hole
        return entry.fault or attested or entry.aside or hole

    def is_partial(self, source: SourceId) -> bool:
        """Whether an unverified source is that for want of old batches only: what is known of it, it does hold."""
        entry = self._sources[source]
        return entry.hole and not (entry.fault or entry.aside or (entry.attestor is not None and entry.attestor.fault))

    def stats(self, source: SourceId) -> SourceStats:
        """Counters, live."""
        return self._sources[source].stats

    def cursor(self, source: SourceId) -> Cursor:
        """Position in the stream, to read."""
        return self._sources[source].cursor

    def last(self, source: SourceId) -> SeqPayload | None:
        """The last batch applied; None before the first."""
        return self._sources[source].last

    def attestor(self, source: SourceId) -> Attestor | None:
        """What watches the source's hashes."""
        return self._sources[source].attestor

    # -- the stream ----------------------------------------------------------------------------------------------

    def live(self, source: SourceId, batch: SeqPayload, *, now_s: float) -> list[Effect]:
        """A batch from the subscription. `now_s`: wall clock, as the engine's `ts`."""
        entry = self._sources.get(source)
        if entry is None or entry.aside:
            return []
        if entry.cursor.accept(batch.seq):  # the common case, without ceremony
            if self._apply(source, entry, batch, now_s):
                return []
            return self._advance(source, entry, Advance(wish=entry.cursor.pending), now_s)
        return self._advance(source, entry, entry.cursor.live(batch), now_s)

    def replaying(self, source: SourceId, batches: list[SeqPayload], *, now_s: float) -> list[Effect]:
        """A part of the answer to a replay request."""
        entry = self._sources.get(source)
        if entry is None or entry.aside:
            return []
        return self._advance(source, entry, entry.cursor.replaying(batches), now_s)

    def replayed(self, source: SourceId, batches: list[SeqPayload], *, now_s: float) -> list[Effect]:
        """The answer to a replay request is whole with these."""
        effects = self.replaying(source, batches, now_s=now_s)
        entry = self._sources.get(source)
        if effects or entry is None or entry.aside:
            return effects
        return self._advance(source, entry, entry.cursor.replayed(), now_s)

    def replay_failed(self, source: SourceId) -> list[Effect]:
        """The replay socket didn't answer in time."""
        return self._step(source, Cursor.failed)

    def retry(self, source: SourceId) -> list[Effect]:
        """Neither replay nor snapshot could be had: try the replay again."""
        entry = self._sources.get(source)
        return [] if entry is None or entry.restore else self._step(source, Cursor.retried)

    def doubt(self, source: SourceId) -> list[Effect]:
        """The connection to the source was lost: predict nothing until a replay shows that it is still the same."""
        return self._step(source, Cursor.doubted)

    def announced(self, source: SourceId, last_seq: int) -> list[Effect]:
        """A heartbeat names the last batch published."""
        entry = self._sources.get(source)
        if entry is None or entry.aside:
            return []
        return self._advance(source, entry, entry.cursor.announced(last_seq), 0.0)

    def adopt(self, source: SourceId, *, now_s: float) -> list[Effect]:
        """Nobody has what is missing: go on from what there is, unverified until the source's cache is cleared.

        What is known to be held is kept from now on only, so that it is never too much.
        """
        entry = self._sources.get(source)
        if entry is None or entry.aside or entry.restore:
            return []
        self.index.clear(source)
        entry.hole, entry.journal = True, None
        return self._advance(source, entry, entry.cursor.adopted(), now_s)

    # -- snapshots -----------------------------------------------------------------------------------------------

    def snapshot(self, source: SourceId, last_seq: int, blocks: Mapping[Tier, Hashes], *, now_s: float) -> list[Effect]:
        """Replace all that is known of the source by `blocks` (a hash as often as it was stored).

        They are the state after batch `last_seq`; -1 for before the first.
        """
        restore = self.restore_begins(source)
        return self.restored(source, restore, last_seq, now_s=now_s) if self.restoring(source, restore, blocks) else []

    def restore_begins(self, source: SourceId) -> int:
        """A snapshot is there and comes in parts; returns what `restoring` and `restored` know it by."""
        entry = self._sources.get(source)
        if entry is None or entry.aside:
            return 0
        self.index.clear(source)
        entry.cursor.lost(0)
        entry.journal = None
        self._note(entry)
        self._num_restores += 1
        entry.restore = self._num_restores
        return entry.restore

    def restoring(self, source: SourceId, restore: int, blocks: Mapping[Tier, Hashes]) -> bool:
        """A part. False: the snapshot is to be dropped, for want of room or since another one has come."""
        entry = self._sources.get(source)
        if entry is None or not restore or entry.restore != restore:
            return False
        try:
            self.index.extend(source, blocks)
        except IndexFullError:
            entry.restore = 0
            self.index.clear(source)
            self._set_one_aside()
            return False
        return True

    def restored(self, source: SourceId, restore: int, last_seq: int, *, now_s: float) -> list[Effect]:
        """The snapshot is whole, and the state after batch `last_seq`; -1 for before the first."""
        entry = self._sources.get(source)
        if entry is None or not restore or entry.restore != restore:
            return []
        entry.hole, entry.last, entry.restore = False, None, 0
        return self._advance(source, entry, entry.cursor.jumped(last_seq), now_s)

    # -- trust ---------------------------------------------------------------------------------------------------

    def condemn(self, source: SourceId, fault: str) -> None:
        """Never predict for this source: what it publishes isn't what we would compute."""
        if source in self._sources:
            self._sources[source].fault = fault
            self._note(self._sources[source])

    def readmit(self) -> list[Effect]:
        """Take back, from its start, a source that was set aside and would find room now."""
        for source, entry in self._sources.items():
            if entry.aside and self.index.fits(entry.aside_blocks):
                entry.aside = ""
                return self._step(source, Cursor.restarted)
        return []

    def start_journal(self, source: SourceId) -> None:
        """Keep the batches that are applied from now on."""
        self._sources[source].journal = []

    def stop_journal(self, source: SourceId) -> list[SeqPayload] | None:
        """All batches applied since `start_journal`; None if there were too many, or if not only batches changed it."""
        entry = self._sources.get(source)
        if entry is None:
            return None
        journal, entry.journal = entry.journal, None
        return journal

    def check(self) -> None:
        """Invariants; for tests."""
        self.index.check()
        for source, entry in self._sources.items():
            assert self.index.add(source) == entry.column
            assert not (entry.aside and self.index.num_copies(source))
            assert self.exact[entry.column] == (self.state(source) is SourceState.EXACT)
        assert self.exact.sum() == sum(self.state(source) is SourceState.EXACT for source in self._sources)

    # -- inside --------------------------------------------------------------------------------------------------

    def _step(self, source: SourceId, step: Callable[[Cursor], Advance]) -> list[Effect]:
        entry = self._sources.get(source)
        return [] if entry is None or entry.aside else self._advance(source, entry, step(entry.cursor), 0.0)

    def _advance(self, source: SourceId, entry: _Source, advance: Advance, now_s: float) -> list[Effect]:
        for batch in advance.apply:
            if not self._apply(source, entry, batch, now_s):
                advance.wish = entry.cursor.pending
                break
        self._note(entry)
        if advance.wish is None or entry.aside:
            return []
        if advance.wish is Wish.REPLAY:
            return [RequestReplay(source, max(0, entry.cursor.next_seq))]
        return [RequestSnapshot(source)]

    def _apply(self, source: SourceId, entry: _Source, item: SeqPayload, now_s: float) -> bool:
        """False: the source's blocks can't be trusted any more."""
        stats = entry.stats
        try:
            batch = decode_batch(item.payload)
        except EventDecodeError:
            stats.bad += 1
            entry.cursor.lost(item.seq)
            return False
        if batch.dp_rank is not None and batch.dp_rank != source.dp_rank:
            self.condemn(source, f"batches are tagged dp_rank {batch.dp_rank}, expected {source.dp_rank}")
        if (attestor := entry.attestor) is not None and attestor.is_open and attestor.wants(batch.events):
            attestor.look(item.payload)
            self._note(entry)
        cleared = stats.cleared
        try:
            self.index.apply(source, batch.events, stats)
        except IndexFullError:
            self._set_one_aside()
            self.index.clear(source)
            entry.cursor.lost(0)
            return False
        if entry.hole and (stats.cleared > cleared or item.seq == 0):
            entry.hole = False
            self._note(entry)
        entry.last = item
        if entry.journal is not None:
            entry.journal.append(item)
            if len(entry.journal) > MAX_JOURNAL:
                entry.journal = None
        stats.batches += 1
        stats.events += len(batch.events)
        stats.bad += batch.num_bad
        stats.lag_s = now_s - batch.ts
        return True

    def _set_one_aside(self) -> bool:
        """Give up the source with the most blocks: the most room for one source. False: none is left."""
        followed = [source for source, entry in self._sources.items() if not entry.aside]
        if not followed:
            return False
        largest = max(followed, key=self.index.num_copies)
        entry = self._sources[largest]
        entry.aside_blocks = self.index.num_copies(largest)
        entry.aside = (
            f"set aside with {entry.aside_blocks} blocks: the index may take {self.index.max_bytes} bytes "
            "(router.max_index_mb)"
        )
        entry.journal, entry.restore = None, 0
        self.index.clear(largest)
        self._note(entry)
        return True

    def _note(self, entry: _Source) -> None:
        self.exact[entry.column] = _state(entry) is SourceState.EXACT


def _state(entry: _Source) -> SourceState:
    if entry.fault or entry.aside or (entry.attestor is not None and entry.attestor.fault):
        return SourceState.UNVERIFIED
    if entry.cursor.pending is not None:
        return SourceState.SYNCING
    return SourceState.UNVERIFIED if entry.hole else SourceState.EXACT
