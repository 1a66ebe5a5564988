"""The flat block table: published hash -> which columns hold it. Owned by BlockIndex, which gives columns meaning.

Exact at any number of columns: a block's holders are a bit set, one 64-bit word per 64 columns. 16 bytes a slot
up to 64 columns, so at most 16 / (MAX_LOAD / 2) bytes a block right after a doubling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router import kernels
from router.budget import Budget, IndexFullError
from router.errors import EventDecodeError

Hashes = NDArray[np.uint64]
"""Published hashes as unsigned 64-bit integers; the signed form of SGLang is the same bits."""

MAX_LOAD: Final = 0.8
"""Linear probing on uniform keys looks at about 3 slots on a hit here; beyond, clusters grow fast."""
MIN_SLOTS: Final = 1 << 10
_NONE: Final = np.zeros(0, np.uint64)
_COLUMNS_PER_WORD: Final = 64
_WORD: Final = (1 << 64) - 1
_WORD_BYTES: Final = 8


class BlockTable:
    """Set of (hash, column) pairs with bulk store, remove and prefix match."""

    def __init__(self, *, min_blocks: int = 0, budget: Budget | None = None) -> None:
        """`min_blocks`: room to reserve so that filling up to it never pauses to grow. Raises IndexFullError."""
        self._min_slots = _slots_for(min_blocks)
        self._budget = budget or Budget()
        self._slots = self._allocate(self._min_slots, 1)
        #: slots that may be in use before the table grows
        self._room = int(self._min_slots * MAX_LOAD)
        #: counters by the kernels' names, then blocks per column
        self._counts: NDArray[np.int64] = np.zeros(kernels.HELD + _COLUMNS_PER_WORD, np.int64)
        self._scratch: Hashes = np.zeros(0, np.uint64)

    @property
    def num_words(self) -> int:
        """64-bit words of an alive set."""
        return int(self._slots.shape[1]) - 1

    @property
    def num_hashes(self) -> int:
        """Distinct hashes held by any column."""
        return int(self._counts[kernels.USED])

    @property
    def size_bytes(self) -> int:
        """Memory of the table itself."""
        return int(self._slots.nbytes)

    def held(self, column: int) -> int:
        """Blocks that `column` holds."""
        at = kernels.HELD + column
        return int(self._counts[at]) if at < len(self._counts) else 0

    def reserve(self, num_blocks: int) -> None:
        """Make room for `num_blocks` hashes, and never give it back. Less than before changes nothing.

        Raises IndexFullError, having changed nothing.
        """
        num_slots = _slots_for(num_blocks)
        if self._slots.shape[0] - 1 < num_slots:
            self._resize(num_slots, self.num_words)
        self._min_slots = max(self._min_slots, num_slots)

    def fits(self, num_blocks: int) -> bool:
        """Whether so many more hashes would find room, as far as the budget goes now."""
        num_slots = _slots_for(self.num_hashes + num_blocks)
        if num_slots <= self._slots.shape[0] - 1:
            return True
        return self._budget.allows(_WORD_BYTES * (num_slots + 1) * (1 + self.num_words))

    def widen(self, num_columns: int) -> None:
        """Make room for columns 0 ... num_columns - 1. Raises IndexFullError, having changed nothing."""
        words = max(1, -(-num_columns // _COLUMNS_PER_WORD))
        if words > self.num_words:
            self._resize(self._slots.shape[0] - 1, words)
            more = kernels.HELD + words * _COLUMNS_PER_WORD - len(self._counts)
            self._counts = np.concatenate((self._counts, np.zeros(more, np.int64)))

    def store(self, column: int, packed: bytes | memoryview) -> Hashes:
        """Add the hashes of the concatenated msgpack arrays `packed`; returns those that were already there.

        The result is a view that the next call overwrites. Raises EventDecodeError or IndexFullError, having changed
        nothing.
        """
        raw = self._prepare(packed)
        while True:
            count = kernels.store(self._slots, self._counts, column, raw, self._scratch, self._room)
            if count != kernels.NEEDS_ROOM:
                break
            self._resize(2 * (self._slots.shape[0] - 1), self.num_words)
        if count == kernels.MALFORMED:
            raise EventDecodeError(f"block_hashes is not an array of 64-bit integers ({len(raw)} bytes)")
        repeats = self._counts[kernels.REPEATS]
        return self._scratch[:repeats] if repeats else _NONE

    def remove(self, column: int, packed: bytes | memoryview) -> int:
        """Take the hashes out; returns how many weren't there. Raises EventDecodeError, having changed nothing."""
        raw = self._prepare(packed)
        count = kernels.remove(self._slots, self._counts, column, raw, self._scratch)
        if count == kernels.MALFORMED:
            raise EventDecodeError(f"block_hashes is not an array of 64-bit integers ({len(raw)} bytes)")
        self._shrink()
        return int(self._counts[kernels.REPEATS])

    def parse(self, packed: bytes | memoryview) -> Hashes:
        """The hashes in `packed`, as a copy. Raises EventDecodeError."""
        raw = self._prepare(packed)
        count = kernels.parse(raw, self._scratch)
        if count == kernels.MALFORMED:
            raise EventDecodeError(f"block_hashes is not an array of 64-bit integers ({len(raw)} bytes)")
        return self._scratch[:count].copy()

    def drop(self, column: int) -> None:
        """Take everything of `column` out. O(table)."""
        if self.held(column):
            kernels.drop(self._slots, self._counts, column)
            self._shrink()

    def match(self, keys: Hashes, base: int, walk: Hashes) -> bool:
        """Follow `keys` for the columns alive in `walk` (see kernels.match); True while one is left."""
        return bool(kernels.match(self._slots, keys, base, walk))

    def gather(self, keys: Hashes, rows: NDArray[np.uint64]) -> None:
        """Add the holders of key i to the bit set rows[i] (uint64[len(keys), num_words])."""
        kernels.gather(self._slots, keys, rows)

    def hashes(self, column: int) -> Hashes:
        """All hashes of `column`, in no order. O(table)."""
        out = np.zeros(self.held(column), np.uint64)
        found = kernels.collect(self._slots, column, out) if len(out) else 0
        assert found == len(out)
        return out

    def check(self) -> None:
        """Invariants: counts agree with the slots, and every key is found where it lies. O(table)."""
        columns = range(len(self._counts) - kernels.HELD)
        used = [at for at in range(self._slots.shape[0]) if kernels.is_held(self._slots, at)]
        assert len(used) == self.num_hashes, (len(used), self.num_hashes)
        for at in used:
            assert kernels.find(self._slots, self._slots[at, 0]) == at
        for column in columns:
            assert len(self.hashes(column)) == self.held(column)

    def _prepare(self, packed: bytes | memoryview) -> NDArray[np.uint8]:
        raw = np.frombuffer(packed, np.uint8)
        if len(raw) > len(self._scratch):  # a hash takes a byte at least
            self._scratch = np.zeros(2 * len(raw), np.uint64)
        return raw

    def _allocate(self, num_slots: int, num_words: int) -> NDArray[np.uint64]:
        self._budget.take(_WORD_BYTES * (num_slots + 1) * (1 + num_words))
        return np.zeros((num_slots + 1, 1 + num_words), np.uint64)

    def _resize(self, num_slots: int, num_words: int) -> None:
        slots = self._allocate(num_slots, num_words)
        kernels.copy(self._slots, slots)
        self._budget.give(self._slots.nbytes)
        self._slots = slots
        self._room = int(num_slots * MAX_LOAD)

    def _shrink(self) -> None:
        """Give memory back when an eighth of the room would do; never below what was reserved."""
        while (num_slots := self._slots.shape[0] - 1) > self._min_slots and self.num_hashes < num_slots * MAX_LOAD / 8:
            try:
                self._resize(max(self._min_slots, num_slots // 4), self.num_words)
            except IndexFullError:  # no room to move: the next call tries again
                return


def _slots_for(num_blocks: int) -> int:
    slots = MIN_SLOTS
    while slots * MAX_LOAD < num_blocks:
        slots *= 2
    return slots


def new_walk(columns: Sequence[int] | NDArray[np.int64], num_words: int) -> Hashes:
    """The walk that starts with `columns` alive, each at depth 0."""
    walk = np.zeros(num_words * (1 + _COLUMNS_PER_WORD) + 1, np.uint64)
    kernels.enliven(walk, np.asarray(columns, np.int64))
    return walk


def as_keys(hashes: Sequence[int]) -> Hashes:
    """Signed or unsigned Python integers as table keys."""
    return np.array([value & _WORD for value in hashes], np.uint64)


def pack(hashes: Hashes) -> bytes:
    """Hashes as the msgpack array that `store` and `remove` read."""
    items = np.empty(len(hashes), np.dtype([("kind", "u1"), ("value", ">u8")]))
    items["kind"] = 0xCF
    items["value"] = hashes
    return b"\xdd" + len(hashes).to_bytes(4, "big") + items.tobytes()
