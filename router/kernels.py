"""Compiled loops over the block table's memory. Knows slots and bits, nothing of workers or events.

Theory of operation. `slots` is uint64[N + 1, 1 + W], N a power of two: column 0 is the block hash, the other
W words are the bit set of table columns that hold it. Open addressing with linear probing from `hash & (N-1)`
(published hashes are SHA-256 output, so their low bits are uniform as they are), backward-shift deletion, so
there are no tombstones and no pauses to sweep them. Hash 0 marks an empty slot; the block whose hash really is
0 lives in slot N. Callers keep the load below `MAX_LOAD`. `counts` carries counters in and
out, see the names.

Hashes arrive as raw msgpack arrays of integers (signed, unsigned, or 8-byte strings: one key), because building
Python integers from them costs more than the table itself.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, int64, njit, uint8, uint64, void
from numba.types import Array

USED = 0  # counts: slots in use
REPEATS = 1  # counts: hashes of the last call that were already held (store) or not held (remove)
HELD = 2  # counts: from here on, blocks per column

MALFORMED = -1
"""Result: the bytes aren't a msgpack array of hashes; nothing was changed."""
NEEDS_ROOM = -2
"""Result: the table must grow first; nothing was changed."""

TOUCH_AHEAD = 128
"""Keys whose slots are loaded ahead of a walk: a few more than loads can be under way, far fewer than L1 holds."""

_RAW = Array(uint8, 1, "C", readonly=True)
_KEYS = uint64[::1]
_COUNTS = int64[::1]
_SLOTS = uint64[:, ::1]

_ONE = np.uint64(1)
_ZERO = np.uint64(0)


@njit(int64(_RAW, _KEYS), cache=True, nogil=True)
def parse(raw, out):  # type: ignore[no-untyped-def]  # numba compiles it, mypy cannot see its types
    """Hashes of the concatenated msgpack arrays in `raw`, into `out` (>= len(raw) long): their count or MALFORMED."""
    end = raw.shape[0]
    at = 0
    found = 0
    while at < end:
        kind = raw[at]
        at += 1
        if 0x90 <= kind <= 0x9F:
            left = np.int64(kind & 0x0F)
        elif kind == 0xDC and at + 2 <= end:
            left = (np.int64(raw[at]) << 8) | np.int64(raw[at + 1])
            at += 2
        elif kind == 0xDD and at + 4 <= end:
            left = np.int64(0)
            for k in range(4):
                left = (left << 8) | np.int64(raw[at + k])
            at += 4
        else:
            return MALFORMED
        for _ in range(left):
            if at >= end:
                return MALFORMED
            kind = raw[at]
            at += 1
            if kind < 0x80:
                out[found] = np.uint64(kind)
                found += 1
                continue
            if kind >= 0xE0:
                out[found] = np.uint64(np.int64(np.int8(kind)))
                found += 1
                continue
            signed = 0xD0 <= kind <= 0xD3
            if kind == 0xC4 and at < end and raw[at] == 8:  # bin 8 of 8 bytes
                at += 1
                width = 8
            elif 0xCC <= kind <= 0xCF:
                width = 1 << (kind - 0xCC)
            elif signed:
                width = 1 << (kind - 0xD0)
            else:
                return MALFORMED
            if at + width > end:
                return MALFORMED
            value = np.uint64(0)
            if signed and raw[at] >= 0x80:
                value = ~_ZERO
            for k in range(width):
                value = (value << np.uint64(8)) | np.uint64(raw[at + k])
            at += width
            out[found] = value
            found += 1
    return found


@njit(int64(_SLOTS, uint64), cache=True, nogil=True)
def find(slots, key):  # type: ignore[no-untyped-def]
    """Slot of `key`, or the empty slot where it would go."""
    num_slots = slots.shape[0] - 1
    if key == _ZERO:
        return num_slots
    mask = np.uint64(num_slots - 1)
    at = key & mask
    while slots[at, 0] != key and slots[at, 0] != _ZERO:
        at = (at + _ONE) & mask
    return np.int64(at)


@njit(boolean(_SLOTS, int64), cache=True, nogil=True)
def is_held(slots, at):  # type: ignore[no-untyped-def]
    """Whether any column holds slot `at`."""
    for word in range(1, slots.shape[1]):  # noqa: SIM110  # numba compiles no generator here
        if slots[at, word] != _ZERO:
            return True
    return False


@njit(void(_SLOTS, int64), cache=True, nogil=True)
def erase(slots, at):  # type: ignore[no-untyped-def]
    """Empty slot `at`, moving back what probed past it."""
    num_slots = slots.shape[0] - 1
    slots[at, :] = _ZERO
    if at == num_slots:
        return
    mask = num_slots - 1
    hole = at
    probe = at
    while True:
        probe = (probe + 1) & mask
        if slots[probe, 0] == _ZERO:
            return
        home = np.int64(slots[probe, 0] & np.uint64(mask))
        if ((probe - home) & mask) >= ((probe - hole) & mask):
            slots[hole, :] = slots[probe, :]
            slots[probe, :] = _ZERO
            hole = probe


@njit(uint64(_SLOTS, _KEYS, int64, int64), cache=True, nogil=True)
def touch(slots, keys, start, stop):  # type: ignore[no-untyped-def]
    """Load the slots of keys [start, stop) ahead of their use: independent loads overlap, a walk's may not."""
    mask = np.uint64(slots.shape[0] - 2)
    seen = _ZERO
    for i in range(start, stop):
        seen ^= slots[keys[i] & mask, 0]
    return seen


@njit(int64(_SLOTS, _COUNTS, int64, _RAW, _KEYS, int64), cache=True, nogil=True)
def store(slots, counts, column, raw, scratch, room):  # type: ignore[no-untyped-def]
    """Set `column`'s bit on every hash in `raw`; those that had it are left in `scratch`. Count, or negative."""
    count = parse(raw, scratch)
    if count < 0:
        return count
    if counts[USED] + count > room:
        return NEEDS_ROOM
    word = 1 + column // 64
    bit = _ONE << np.uint64(column % 64)
    repeated = 0
    counts[REPEATS] = np.int64(touch(slots, scratch, 0, count))
    for i in range(count):
        key = scratch[i]
        at = find(slots, key)
        if slots[at, word] & bit:
            scratch[repeated] = key
            repeated += 1
            continue
        if not is_held(slots, at):
            slots[at, 0] = key
            counts[USED] += 1
        slots[at, word] |= bit
    counts[HELD + column] += count - repeated
    counts[REPEATS] = repeated
    return count


@njit(int64(_SLOTS, _COUNTS, int64, _RAW, _KEYS), cache=True, nogil=True)
def remove(slots, counts, column, raw, scratch):  # type: ignore[no-untyped-def]
    """Clear `column`'s bit on every hash in `raw`; count of hashes read, or MALFORMED."""
    count = parse(raw, scratch)
    if count < 0:
        return count
    word = 1 + column // 64
    bit = _ONE << np.uint64(column % 64)
    missing = 0
    counts[REPEATS] = np.int64(touch(slots, scratch, 0, count))
    for i in range(count):
        at = find(slots, scratch[i])
        if not slots[at, word] & bit:
            missing += 1
            continue
        slots[at, word] ^= bit
        if not is_held(slots, at):
            erase(slots, at)
            counts[USED] -= 1
    counts[HELD + column] -= count - missing
    counts[REPEATS] = missing
    return count


@njit(void(_SLOTS, _COUNTS, int64), cache=True, nogil=True)
def drop(slots, counts, column):  # type: ignore[no-untyped-def]
    """Clear `column`'s bit everywhere. O(slots)."""
    word = 1 + column // 64
    bit = _ONE << np.uint64(column % 64)
    at = 0
    while at < slots.shape[0]:
        if slots[at, word] & bit:
            slots[at, word] ^= bit
            if not is_held(slots, at):
                erase(slots, at)
                counts[USED] -= 1
                continue  # another entry may have moved into this slot
        at += 1
    counts[HELD + column] = 0


@njit(void(_SLOTS, _SLOTS), cache=True, nogil=True)
def copy(old, new):  # type: ignore[no-untyped-def]
    """Fill the empty table `new` (its own size and width) with the entries of `old`."""
    for at in range(old.shape[0]):
        if not is_held(old, at):
            continue
        to = find(new, old[at, 0])
        for word in range(min(old.shape[1], new.shape[1])):
            new[to, word] = old[at, word]


@njit(void(_KEYS, int64[::1]), cache=True, nogil=True)
def enliven(walk, columns):  # type: ignore[no-untyped-def]
    """Set the bits of `columns` in the first words of `walk`."""
    for i in range(columns.shape[0]):
        walk[columns[i] // 64] |= _ONE << np.uint64(columns[i] % 64)


@njit(void(_KEYS, int64, uint64, uint64, int64), cache=True, nogil=True)
def drop_out(walk, words, gone, depth, word):  # type: ignore[no-untyped-def]
    """Note `depth` for every column of the bit set `gone`, which is word `word` of the columns."""
    for bit in range(64):
        if (gone >> np.uint64(bit)) & _ONE:
            walk[words + word * 64 + bit] = depth


@njit(boolean(_SLOTS, _KEYS, int64, _KEYS), cache=True, nogil=True)
def match(slots, keys, base, walk):  # type: ignore[no-untyped-def]
    """Follow `keys` in prompt order while some column of the walk holds each; True while one is left.

    `walk` is, for W words of columns: [0, W) the columns still alive, [W, 65 W) each column's depth, and a last
    entry that means nothing and keeps the compiler from dropping the loads ahead. A column that doesn't hold key i
    drops out with depth base + i; those that hold all get base + len(keys).
    """
    words = slots.shape[1] - 1
    mask = np.uint64(slots.shape[0] - 2)
    ahead = 0
    for i in range(keys.shape[0]):
        if i == ahead:
            ahead = min(i + TOUCH_AHEAD, keys.shape[0])
            walk[walk.shape[0] - 1] = touch(slots, keys, i, ahead)
        key = keys[i]
        at = key & mask
        if slots[at, 0] != key or key == _ZERO:
            at = np.uint64(find(slots, key))
        if words == 1:  # the common case, without the loop
            held = slots[at, 1]
            if walk[0] & ~held:
                drop_out(walk, 1, walk[0] & ~held, np.uint64(base + i), 0)
                walk[0] &= held
                if walk[0] == _ZERO:
                    return False
            continue
        some = _ZERO
        for w in range(words):
            gone = walk[w] & ~slots[at, 1 + w]
            if gone:
                drop_out(walk, words, gone, np.uint64(base + i), w)
                walk[w] ^= gone
            some |= walk[w]
        if some == _ZERO:
            return False
    for w in range(words):
        drop_out(walk, words, walk[w], np.uint64(base + keys.shape[0]), w)
    return True


@njit(int64(_SLOTS, int64, _KEYS), cache=True, nogil=True)
def collect(slots, column, out):  # type: ignore[no-untyped-def]
    """Hashes that `column` holds, into `out`: their count."""
    word = 1 + column // 64
    bit = _ONE << np.uint64(column % 64)
    found = 0
    for at in range(slots.shape[0]):
        if slots[at, word] & bit:
            out[found] = slots[at, 0]
            found += 1
    return found


@njit(void(_SLOTS, _KEYS, _SLOTS), cache=True, nogil=True)
def gather(slots, keys, rows):  # type: ignore[no-untyped-def]
    """Add the holders of key i to the bit set rows[i], so that several tables can be matched as one."""
    for i in range(keys.shape[0]):
        at = find(slots, keys[i])
        for word in range(rows.shape[1]):
            rows[i, word] |= slots[at, 1 + word]


@njit(boolean(_SLOTS, int64, _KEYS), cache=True, nogil=True)
def narrow(rows, base, walk):  # type: ignore[no-untyped-def]
    """`match` over bit sets that `gather` filled."""
    words = rows.shape[1]
    for i in range(rows.shape[0]):
        some = _ZERO
        for w in range(words):
            gone = walk[w] & ~rows[i, w]
            if gone:
                drop_out(walk, words, gone, np.uint64(base + i), w)
                walk[w] ^= gone
            some |= walk[w]
        if some == _ZERO:
            return False
    for w in range(words):
        drop_out(walk, words, walk[w], np.uint64(base + rows.shape[0]), w)
    return True
