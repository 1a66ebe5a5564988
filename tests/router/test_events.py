"""The codec: every form of a batch gives the same events; anything else is EventDecodeError, or a counted bad event."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import EventDecodeError
from router.events import Batch, Cleared, Removed, Stored, decode_batch
from router.ids import DpRank, Incarnation, SourceId, WorkerId
from router.index import BlockIndex

pack = msgspec.msgpack.encode
SOURCE = SourceId(WorkerId("w0"), Incarnation("i1"), DpRank(0))

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [5, -7, 1 << 40],
    "parent_block_hash": None,
    "token_ids": list(range(12)),
    "block_size": 4,
    "lora_id": None,
    "medium": "GPU",
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [-7], "medium": "GPU"}
CLEARED = {"type": "AllBlocksCleared"}
AS_ARRAYS = [list(event.values()) for event in (STORED, REMOVED, CLEARED)]
WHOLE = pack([1.5, [CLEARED, STORED, REMOVED], 0])
OLD_WHOLE = pack([1.5, [AS_ARRAYS[2], AS_ARRAYS[0], AS_ARRAYS[1]], 0])
MINIMAL = [1.0, [{"type": "BlockStored", "block_hashes": [5]}], None]


def plain(batch: Batch) -> list[tuple[Any, ...]]:
    """Events as (kind, hashes, medium)."""
    return [
        (type(e).__name__, None if isinstance(e, Cleared) else msgspec.msgpack.decode(e.block_hashes))
        + (() if isinstance(e, Cleared) else (e.medium,))
        for e in batch.events
    ]


def survives(payload: bytes) -> Batch | None:
    """Decode and apply: the batch, or None where it is refused. Any other error is the test's failure."""
    try:
        batch = decode_batch(payload)
    except EventDecodeError:
        return None
    index = BlockIndex()
    index.add(SOURCE)
    assert index.apply(SOURCE, batch.events).bad <= len(batch.events)
    assert all(isinstance(event, Stored | Removed | Cleared) for event in batch.events)
    index.check()
    return batch


@pytest.mark.parametrize("payload", [WHOLE, OLD_WHOLE], ids=["maps", "arrays"])
def test_maps_and_arrays_give_the_same_events(payload: bytes) -> None:
    batch = decode_batch(payload)
    expected = [("Cleared", None), ("Stored", [5, -7, 1 << 40], "GPU"), ("Removed", [-7], "GPU")]
    assert (plain(batch), batch.ts, batch.dp_rank, batch.num_bad) == (expected, 1.5, 0, 0)


def test_unknown_keys_and_fields_are_ignored() -> None:
    maps = decode_batch(pack([1.0, [{**STORED, "color": {"deep": [1]}}], 0, "a fourth field"]))
    arrays = decode_batch(pack([1.0, [[*AS_ARRAYS[0], "salt", None, "further"]], 0]))
    assert plain(maps) == plain(arrays) == [("Stored", [5, -7, 1 << 40], "GPU")]
    assert (maps.num_bad, arrays.num_bad) == (0, 0)


def test_missing_optionals_are_none() -> None:
    expected = [("Stored", [5], None)]
    assert plain(decode_batch(pack(MINIMAL))) == expected
    assert plain(decode_batch(pack([1.0, [["BlockStored", [5]]]]))) == expected
    assert decode_batch(pack([1.0, []])).dp_rank is None


def test_keys_may_come_in_any_order() -> None:
    backwards = dict(reversed(STORED.items()))
    assert plain(decode_batch(pack([1.0, [backwards], 0]))) == plain(decode_batch(pack([1.0, [STORED], 0])))


BAD_EVENTS = {
    "unknown type": {"type": "BlockMoved", "block_hashes": [1]},
    "unknown type, array": ["BlockMoved", [1]],
    "no type": {"block_hashes": [1]},
    "no hashes": {"type": "BlockStored"},
    "no hashes, array": ["BlockStored"],
    "empty array": [],
    "empty map": {},
    "type is a number": {"type": 3, "block_hashes": [1]},
    "type is a number, array": [3, [1]],
    "medium is a number": {**STORED, "medium": 3},
    "a number": 3,
    "nil": None,
    "a string": "BlockStored",
}


@pytest.mark.parametrize("bad", BAD_EVENTS.values(), ids=BAD_EVENTS)
@pytest.mark.parametrize("good", [STORED, AS_ARRAYS[0]], ids=["map", "array"])
def test_bad_event_is_counted_and_its_neighbours_stand(bad: Any, good: Any) -> None:
    batch = decode_batch(pack([1.0, [good, bad, REMOVED], 0]))
    assert [kind for kind, *_ in plain(batch)] == ["Stored", "Removed"]
    assert batch.num_bad == 1


@pytest.mark.parametrize(
    "value", [None, 3, "x", {}, [], [1.0], ["x", [], 0], [1.0, 3, 0], [1.0, {}, 0], [1.0, [], "r0"], [1.0, [], 1.5]]
)
def test_what_is_no_batch_is_refused(value: Any) -> None:
    with pytest.raises(EventDecodeError, match=r"^not an event batch \(\d+ bytes\): "):
        decode_batch(pack(value))


@pytest.mark.parametrize("payload", [WHOLE, OLD_WHOLE, pack(MINIMAL)], ids=["maps", "arrays", "minimal"])
def test_truncated_at_any_byte_is_refused(payload: bytes) -> None:
    assert [n for n in range(len(payload)) if survives(payload[:n]) is not None] == []


def test_trailing_bytes_are_refused() -> None:
    assert survives(WHOLE + b"\0") is None


@pytest.mark.parametrize("payload", [WHOLE, OLD_WHOLE], ids=["maps", "arrays"])
def test_any_flipped_bit_is_read_or_refused(payload: bytes) -> None:
    outcomes = set()
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << (bit % 8)
        batch = survives(bytes(flipped))
        outcomes.add("refused" if batch is None else "partly" if batch.num_bad else "read")
    assert outcomes == {"refused", "partly", "read"}


@pytest.mark.parametrize("count", [1, 0x7F, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("header", [0xDD, 0xDF, 0xDB, 0xC6, 0xC9])
@pytest.mark.parametrize(
    "where", [b"\x93\xcb" + struct.pack(">d", 1.0), WHOLE[:10] + b"\x91", WHOLE[:10] + b"\x91\x81"]
)
def test_length_that_lies_is_refused(where: bytes, header: int, count: int) -> None:
    assert survives(where + bytes([header]) + count.to_bytes(4, "big")) is None


@pytest.mark.parametrize("lie", [b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x9f", b"\x90"])
def test_hash_count_that_lies_is_read_or_refused(lie: bytes) -> None:
    honest = pack([1.0, [{"type": "BlockStored", "block_hashes": [1, 2, 3], "medium": "GPU"}], 0])
    assert honest.count(b"\x93\1\2\3") == 1
    assert survives(honest) is not None
    assert survives(honest.replace(b"\x93\1\2\3", lie + b"\1\2\3")) is None


@pytest.mark.parametrize("head", [b"", b"\x93\xcb" + struct.pack(">d", 1.0), WHOLE[:10] + b"\x91\x82" + pack("x")])
def test_nesting_without_end_is_refused(head: bytes) -> None:
    assert survives(head + b"\x91" * 100_000) is None


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(st.binary(max_size=60), st.integers(0, len(WHOLE)), st.integers(0, len(WHOLE)))
def test_noise_anywhere_is_read_or_refused(noise: bytes, start: int, end: int) -> None:
    survives(noise)
    survives(WHOLE[:start] + noise + WHOLE[end:])
