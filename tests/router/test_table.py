"""The block table is a dict of sets, through growth, shrinking, dropped columns and the hash 0."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.errors import EventDecodeError
from router.table import MAX_LOAD, MIN_SLOTS, BlockTable, as_keys, new_walk
from router.table import pack as pack_keys

pack = msgspec.msgpack.encode

#: keys that land on few slots of the smallest table (some on its last ones, so that probing wraps), 0 and the largest
KEYS = [0, (1 << 64) - 1, *(home + MIN_SLOTS * n for home in (1, 2, MIN_SLOTS - 2, MIN_SLOTS - 1) for n in range(5))]
COLUMNS = [0, 1, 63, 64, 65, 130]


def signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def columns_of(table: BlockTable, columns: Sequence[int], keys: list[int], *, base: int = 0) -> dict[int, int]:
    """Depth of each column by `match`."""
    walk = new_walk(columns, table.num_words)
    left = table.match(as_keys(keys), base, walk)
    depth = {column: int(walk[table.num_words + column]) for column in columns}
    assert left == any(reached == base + len(keys) for reached in depth.values())
    return depth


class TableAgainstDictOfSets(RuleBasedStateMachine):
    """Every operation on a table and on its naive twin."""

    @initialize(num_columns=st.sampled_from([1, 64, 65]))
    def start(self, num_columns: int) -> None:
        self.table = BlockTable()
        self.model: dict[int, set[int]] = {column: set() for column in COLUMNS}
        self.num_columns = 0
        self.widen(num_columns)

    def column(self, n: int) -> int:
        return [column for column in COLUMNS if column < self.num_columns][n % len(COLUMNS) % self.num_known]

    @property
    def num_known(self) -> int:
        return sum(column < self.num_columns for column in COLUMNS)

    @rule(num_columns=st.sampled_from([64, 65, 131]))
    def widen(self, num_columns: int) -> None:
        self.num_columns = max(self.num_columns, num_columns)
        self.table.widen(num_columns)

    @rule(n=st.integers(0, 5), keys=st.lists(st.sampled_from(KEYS), max_size=12), negative=st.booleans())
    def store(self, n: int, keys: list[int], negative: bool) -> None:
        held = self.model[self.column(n)]
        expected = []
        for key in keys:
            expected += [key] if key in held else []
            held.add(key)
        repeats = self.table.store(self.column(n), pack([signed(key) if negative else key for key in keys]))
        assert repeats.tolist() == expected

    @rule(n=st.integers(0, 5), keys=st.lists(st.sampled_from(KEYS), max_size=12))
    def remove(self, n: int, keys: list[int]) -> None:
        held = self.model[self.column(n)]
        missing = len(keys) - len(held & set(keys))
        held.difference_update(keys)
        assert self.table.remove(self.column(n), pack(keys)) == missing

    @rule(n=st.integers(0, 5), start=st.integers(0, 3))
    def store_many(self, n: int, start: int) -> None:
        """More than fits, so that the table grows."""
        keys = range(start * 1000 + 7, start * 1000 + 7 + MIN_SLOTS)
        self.model[self.column(n)].update(keys)
        self.table.store(self.column(n), pack(list(keys)))

    @rule(n=st.integers(0, 5))
    def remove_all(self, n: int) -> None:
        """Down to nothing, so that the table shrinks."""
        held = self.model[self.column(n)]
        assert self.table.remove(self.column(n), pack(sorted(held))) == 0
        held.clear()

    @rule(n=st.integers(0, 5))
    def drop(self, n: int) -> None:
        self.table.drop(self.column(n))
        self.model[self.column(n)].clear()

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=8), base=st.sampled_from([0, 16]))
    def match(self, keys: list[int], base: int) -> None:
        known = [column for column in COLUMNS if column < self.num_columns]
        naive = {}
        for column in known:
            outside = [i for i, key in enumerate(keys) if key not in self.model[column]]
            naive[column] = base + (outside[0] if outside else len(keys))
        assert columns_of(self.table, known, keys, base=base) == naive

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=8))
    def gather(self, keys: list[int]) -> None:
        rows = np.zeros((len(keys), self.table.num_words), np.uint64)
        self.table.gather(as_keys(keys), rows)
        for key, row in zip(keys, rows.tolist(), strict=True):
            bits = sum(word << (64 * i) for i, word in enumerate(row))
            assert bits == sum(1 << column for column in COLUMNS if key in self.model[column])

    @invariant()
    def counts_agree(self) -> None:
        assert [self.table.held(column) for column in COLUMNS] == [len(self.model[column]) for column in COLUMNS]
        assert self.table.num_hashes == len(set().union(*self.model.values()))

    def teardown(self) -> None:
        known = [column for column in COLUMNS if column < self.num_columns]
        assert {c: set(self.table.hashes(c).tolist()) for c in known} == {c: self.model[c] for c in known}
        self.table.check()
        for column in known:
            self.table.drop(column)
        assert (self.table.num_hashes, self.table.size_bytes) == (0, (MIN_SLOTS + 1) * 8 * (1 + self.table.num_words))


TestTable = TableAgainstDictOfSets.TestCase
TestTable.settings = settings(deadline=None, max_examples=40, stateful_step_count=30, derandomize=True, database=None)


FORMS = {
    "signed": lambda key: pack(signed(key)),
    "unsigned": pack,
    "signed 64 bit": lambda key: b"\xd3" + key.to_bytes(8, "big"),
    "unsigned 64 bit": lambda key: b"\xcf" + key.to_bytes(8, "big"),
    "8 bytes": lambda key: pack(key.to_bytes(8, "big")),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_every_form_of_a_hash_is_one_key(form: str, other: str) -> None:
    table = BlockTable()
    for key in (0, 1, 127, 128, 255, 1 << 16, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 32):
        table.store(0, b"\x91" + FORMS[form](key))
        assert table.hashes(0).tolist() == [key]
        assert (table.remove(0, b"\x91" + FORMS[other](key)), table.num_hashes) == (0, 0)
    table.check()


@pytest.mark.parametrize("value", [-1, -32, -33, -128, -129, -(1 << 15) - 1, -(1 << 31) - 1, -(1 << 63)])
def test_negative_hash_is_its_bit_pattern(value: int) -> None:
    table = BlockTable()
    table.store(0, pack([value]))
    assert table.hashes(0).tolist() == [value % (1 << 64)]


@pytest.mark.parametrize("header", [b"\x93", b"\xdc\0\3", b"\xdd\0\0\0\3"])
def test_every_array_header_is_read(header: bytes) -> None:
    table = BlockTable()
    table.store(0, header + b"\1\2\3" + pack([4]))
    assert sorted(table.hashes(0).tolist()) == [1, 2, 3, 4]


WHOLE = pack([5, 300, 1 << 40, -7, (11).to_bytes(8, "big")])
MALFORMED = {
    **{f"cut at {n}": WHOLE[:n] for n in range(1, len(WHOLE))},
    "nil": b"\xc0",
    "an integer": b"\5",
    "a string among them": pack([1, "x"]),
    "7 bytes": pack([b"1234567"]),
    "a float": pack([1.5]),
    "an array in it": pack([[1]]),
    "count that lies, 16 bit": b"\xdc\xff\xff\1",
    "count that lies, 32 bit": b"\xdd\xff\xff\xff\xff\1",
    "half a count": b"\xdd\0\0",
    "a good array, then a bad one": pack([1]) + b"\x92\1",
}


@pytest.mark.parametrize("call", ["store", "remove", "parse"])
@pytest.mark.parametrize("packed", MALFORMED.values(), ids=MALFORMED)
def test_malformed_array_raises_and_changes_nothing(call: str, packed: bytes) -> None:
    table = BlockTable()
    table.store(0, pack([1, 300]))
    with pytest.raises(EventDecodeError, match=r"^block_hashes is not an array of 64-bit integers \(\d+ bytes\)$"):
        table.parse(packed) if call == "parse" else getattr(table, call)(0, packed)
    assert sorted(table.hashes(0).tolist()) == [1, 300]
    table.check()


def test_empty_arrays_change_nothing() -> None:
    table = BlockTable()
    assert table.store(0, b"").tolist() == table.store(0, pack([])).tolist() == []
    assert (table.remove(0, pack([])), table.num_hashes) == (0, 0)


def test_reserved_room_is_neither_outgrown_nor_given_back() -> None:
    table = BlockTable(min_blocks=10_000)
    before = table.size_bytes
    table.store(0, pack(list(range(10_000))))
    full = table.size_bytes
    table.drop(0)
    assert (full, table.size_bytes) == (before, before)


def test_memory_comes_back_after_a_million_blocks() -> None:
    table = BlockTable()
    before = table.size_bytes
    keys = np.random.default_rng(7).integers(0, 1 << 64, (10, 100_000), np.uint64)
    for some in keys:
        table.store(0, pack_keys(some))
    assert (table.num_hashes, table.size_bytes <= 16 * (1_000_000 / (MAX_LOAD / 2) + 1)) == (1_000_000, True)
    assert [table.remove(0, pack_keys(some)) for some in keys] == [0] * 10
    assert (table.num_hashes, table.size_bytes) == (0, before)


def test_memory_comes_back_at_once_when_a_column_is_dropped() -> None:
    table = BlockTable()
    before = table.size_bytes
    table.store(0, pack_keys(np.random.default_rng(7).integers(0, 1 << 64, 100_000, np.uint64)))
    table.drop(0)
    assert table.size_bytes == before
    table.check()


def test_unknown_column_holds_nothing() -> None:
    assert BlockTable().held(1000) == 0
