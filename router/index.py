"""The block index: which source holds which block, in which tier. Exact: it answers as the engines' trees would.

It gives table columns to sources and keeps a table per tier. A block counts as often as it was stored: stored
twice and removed once, it is held. Called by RouterCore with decoded events; knows nothing of sequence numbers,
adapters or load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router import kernels
from router.budget import Budget, IndexFullError
from router.errors import EventDecodeError
from router.events import Cleared, Event, Removed, Stored, Tier
from router.ids import SourceId
from router.table import BlockTable, Hashes, new_walk, pack


@dataclass(slots=True)
class Tally:
    """Counters of what events did; they only grow."""

    repeats: int = 0
    """Blocks stored that were held already."""
    missing: int = 0
    """Blocks removed that weren't held."""
    bad: int = 0
    """Events that couldn't be read, or that tell of a tier we don't know."""
    cleared: int = 0


SURPLUS_BYTES: Final = 128
"""What a block that was stored again costs beside the table: an entry of a dict, with its two integers."""


class BlockIndex:
    """Blocks of all sources. One loop owns it.

    With `max_bytes`, whatever needs memory raises IndexFullError where it doesn't fit, having changed nothing of the
    source but what came before it in the same call.
    """

    def __init__(self, *, min_blocks: int = 0, max_bytes: int | None = None) -> None:
        """`min_blocks`: distinct blocks to reserve room for. `max_bytes`: hard limit, None for none."""
        self._budget = Budget(max_bytes)
        self._tables: dict[Tier, BlockTable] = {Tier.GPU: BlockTable(min_blocks=min_blocks, budget=self._budget)}
        #: column of every known source
        self._columns: dict[SourceId, int] = {}
        self._free: list[int] = []
        #: how often a held block was stored beyond the first time, where that isn't 0
        self._surplus: dict[tuple[Tier, int], dict[int, int]] = {}

    def reserve(self, num_blocks: int) -> None:
        """Make room for so many distinct blocks on GPU if there is, so that filling up to them never pauses to grow."""
        with contextlib.suppress(IndexFullError):
            self._tables[Tier.GPU].reserve(num_blocks)

    def add(self, source: SourceId) -> int:
        """Give `source` a column (its number is stable until `discard`); the source starts empty."""
        if source not in self._columns:
            column = self._free[-1] if self._free else len(self._columns)
            for table in self._tables.values():
                table.widen(column + 1)
            self._columns[source] = column
            if self._free:
                self._free.pop()
        return self._columns[source]

    def discard(self, source: SourceId) -> None:
        """Forget `source` and its blocks. Unknown sources are none of our business."""
        if source in self._columns:
            self.clear(source)
            self._free.append(self._columns.pop(source))

    def clear(self, source: SourceId) -> None:
        """Drop all blocks of `source`, all tiers."""
        column = self._columns[source]
        for tier, table in self._tables.items():
            table.drop(column)
            self._budget.give(SURPLUS_BYTES * len(self._surplus.pop((tier, column), ())))

    @property
    def num_columns(self) -> int:
        """Columns in use are below this."""
        return len(self._columns) + len(self._free)

    @property
    def size_bytes(self) -> int:
        """Memory of the tables, and of what is counted beside them."""
        return self._budget.used_bytes

    @property
    def max_bytes(self) -> int | None:
        """Limit of size_bytes."""
        return self._budget.max_bytes

    def fits(self, num_blocks: int) -> bool:
        """Whether so many more blocks would find room now."""
        return self._tables[Tier.GPU].fits(num_blocks)

    def num_blocks(self, source: SourceId, tier: Tier = Tier.GPU) -> int:
        """Distinct blocks that `source` holds in `tier`."""
        table = self._tables.get(tier)
        return table.held(self._columns[source]) if table else 0

    def num_copies(self, source: SourceId) -> int:
        """Blocks that `source` holds in all tiers together."""
        return sum(table.held(self._columns[source]) for table in self._tables.values())

    def hashes(self, source: SourceId, tier: Tier = Tier.GPU) -> Hashes:
        """Distinct hashes that `source` holds in `tier`, in no order. O(table)."""
        table = self._tables.get(tier)
        return table.hashes(self._columns[source]) if table else np.zeros(0, np.uint64)

    def export(self, source: SourceId) -> dict[Tier, Hashes]:
        """Everything held, a hash as often as it was stored, by tier. O(table)."""
        column = self._columns[source]
        blocks = {}
        for tier, table in self._tables.items():
            surplus = self._surplus.get((tier, column), {})
            again = np.repeat(np.array(list(surplus), np.uint64), np.array(list(surplus.values()), np.int64))
            held = np.concatenate((table.hashes(column), again))
            if len(held):
                blocks[tier] = held
        return blocks

    def restore(self, source: SourceId, blocks: Mapping[Tier, Hashes]) -> None:
        """Replace everything held by what `export` gave."""
        self.clear(source)
        self.extend(source, blocks)

    def extend(self, source: SourceId, blocks: Mapping[Tier, Hashes]) -> None:
        """Store more blocks, as if by events."""
        for tier, hashes in blocks.items():
            self._store(self._columns[source], tier, pack(hashes), Tally())

    def apply(self, source: SourceId, events: Sequence[Event], tally: Tally | None = None) -> Tally:
        """Apply events in order, counting into `tally` (a new one by default), which is returned.

        Neighbours of one kind and tier go to the table in one call.
        """
        tally = Tally() if tally is None else tally
        column = self._columns[source]
        if _is_one_run(events):  # the common case, told without a loop of ours
            self._apply_run(column, events, tally)  # type: ignore[arg-type]  # no Cleared in a run
            return tally
        at = 0
        while at < len(events):
            first = events[at]
            kind = type(first)
            after = at + 1
            if kind is Cleared:
                self.clear(source)
                tally.cleared += 1
            else:
                medium = first.medium  # type: ignore[union-attr]  # it isn't Cleared
                while after < len(events) and type(e := events[after]) is kind and e.medium == medium:  # type: ignore[union-attr]
                    after += 1
                self._apply_run(column, events[at:after], tally)  # type: ignore[arg-type]  # no Cleared in a run
            at = after
        return tally

    def match(self, pages: Iterable[Hashes], columns: Sequence[int] | NDArray[np.int64]) -> Hashes:
        """Consecutive pages from the first that each of `columns` holds, in any tier: uint64, indexed by column.

        `pages` yields hashes in prompt order and is not read further than anybody holds them.
        """
        table = self._tables[Tier.GPU]
        walk = new_walk(columns, table.num_words)
        base = 0
        for keys in pages:
            if not (table.match(keys, base, walk) if len(self._tables) == 1 else self._match_tiers(keys, base, walk)):
                break
            base += len(keys)
        return walk[table.num_words : -1]

    def check(self) -> None:
        """Invariants; for tests. O(everything)."""
        columns = sorted([*self._columns.values(), *self._free])
        assert columns == list(range(len(columns)))
        for tier, table in self._tables.items():
            table.check()
            for column in self._free:
                assert table.held(column) == 0
                assert (tier, column) not in self._surplus

    def _match_tiers(self, keys: Hashes, base: int, walk: Hashes) -> bool:
        rows = np.zeros((len(keys), self._tables[Tier.GPU].num_words), np.uint64)
        for table in self._tables.values():
            table.gather(keys, rows)
        return bool(kernels.narrow(rows, base, walk))

    def _apply_run(self, column: int, run: Sequence[Stored | Removed], tally: Tally) -> None:
        first = run[0]
        tier = _TIERS.get(first.medium)
        if tier is None:  # of a later release: its blocks aren't ours to promise
            tally.bad += len(run)
            return
        packed: bytes = first.block_hashes if len(run) == 1 else b"".join(map(_HASHES, run))
        try:
            if type(first) is Stored:
                self._store(column, tier, packed, tally)
            else:
                self._remove(column, tier, packed, tally)
        except EventDecodeError:
            if len(run) == 1:
                tally.bad += 1
                return
            for event in run:
                self._apply_run(column, [event], tally)

    def _table(self, tier: Tier) -> BlockTable:
        table = self._tables.get(tier)
        if table is None:
            table = BlockTable(budget=self._budget)
            try:
                table.widen(self.num_columns)
            except IndexFullError:
                self._budget.give(table.size_bytes)
                raise
            self._tables[tier] = table
        return table

    def _store(self, column: int, tier: Tier, packed: bytes, tally: Tally) -> None:
        repeats = self._table(tier).store(column, packed)
        if len(repeats):
            tally.repeats += len(repeats)
            surplus = self._surplus.setdefault((tier, column), {})
            for key in repeats.tolist():
                if key not in surplus:
                    self._budget.take(SURPLUS_BYTES)
                surplus[key] = surplus.get(key, 0) + 1

    def _remove(self, column: int, tier: Tier, packed: bytes, tally: Tally) -> None:
        table = self._table(tier)
        surplus = self._surplus.get((tier, column))
        if surplus:
            last: list[int] = []
            for key in table.parse(packed).tolist():
                if key in surplus:
                    surplus[key] -= 1
                    if not surplus[key]:
                        del surplus[key]
                        self._budget.give(SURPLUS_BYTES)
                else:
                    last.append(key)
            packed = pack(np.array(last, np.uint64))
        tally.missing += table.remove(column, packed)


def _is_one_run(events: Sequence[Event]) -> bool:
    kinds = set(map(type, events))
    return len(kinds) == 1 and Cleared not in kinds and len(set(map(_MEDIUM, events))) == 1


_HASHES: Final = attrgetter("block_hashes")
_MEDIUM: Final = attrgetter("medium")
_TIERS: Final[dict[str | None, Tier]] = {None: Tier.GPU, **{tier.value: tier for tier in Tier}}
"""Tier by `medium`; older engines leave it out and mean the GPU."""
