"""Whatever bytes come as a batch: they are read or refused, in bounded memory, and a snapshot makes up for them."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import table as table_module
from router.attestation import Attestor, HashForm
from router.cursor import SeqPayload
from router.effects import RequestSnapshot
from router.errors import EventDecodeError
from router.events import Batch, Tier, decode_batch
from router.hashing import Namespace, block_hashes
from router.ids import LoraId
from router.ingest import EventIngest, SourceState
from tests.router.publisher import STORED, blocks, encode, exported, source

W0, W1 = source(0), source(1)
PAGE, A1 = 4, LoraId("a1" * 16)
TOKENS = list(range(100, 108))
MAX_PEAK_BYTES = 10_000_000
pack = msgspec.msgpack.encode


def stored(lora_id: LoraId | None, name: str | None, medium: str) -> dict[str, Any]:
    """With all fields that SGLang has."""
    return {
        "type": "BlockStored",
        "block_hashes": block_hashes(TOKENS, PAGE, Namespace.of(extra_key=None, lora_id=lora_id, cache_salt=None)),
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": PAGE,
        "lora_id": None,
        "medium": medium,
        "cache_salt": None,
        "session_id": "s-1",
        "lora_name": name,
    }


EVENTS: list[dict[str, Any]] = [
    {"type": "AllBlocksCleared"},
    stored(None, None, "GPU"),
    stored(A1, "a", "CPU_PINNED"),
    {"type": "BlockRemoved", "block_hashes": [5, -7, 1 << 63], "medium": "GPU"},
]
AS_ARRAYS = [list(event.values())[:7] for event in EVENTS]
MAPS, ARRAYS = pack([1.5, EVENTS, 0]), pack([1.5, AS_ARRAYS, 0])
FORMS = pytest.mark.parametrize("payload", [MAPS, ARRAYS], ids=["maps", "arrays"])

BEFORE = encode(0, (STORED, Tier.GPU, [1, 2, 2]))
HELD = {Tier.GPU: Counter({1: 1, 2: 2})}
TRUTH = {Tier.GPU: Counter({7: 1}), Tier.CPU: Counter({8: 2})}


@pytest.fixture(autouse=True, scope="module")
def small_tables() -> Iterator[None]:
    with patch.object(table_module, "MIN_SLOTS", 8):
        yield


def decoded(payload: bytes) -> Batch | None:
    """None where it is refused; any other error is the test's failure."""
    try:
        return decode_batch(payload)
    except EventDecodeError:
        return None


def followed() -> EventIngest:
    """Two attested sources that hold HELD."""
    ingest = EventIngest()
    for of in (W0, W1):
        attestor = Attestor(HashForm(PAGE))
        attestor.expect({"a": A1})
        ingest.add(of, attestor)
        assert ingest.replayed(of, [SeqPayload(0, BEFORE)], now_s=1.0) == []
    return ingest


def fate(payload: bytes) -> str:
    """What becomes of a source whose second batch is `payload`: exact, or asks, or faulty for what the batch says."""
    ingest = followed()
    tracemalloc.start()
    try:
        batch = decoded(payload)
        effects = ingest.live(W0, SeqPayload(1, payload), now_s=1.0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MAX_PEAK_BYTES
    state, fault = ingest.state(W0), ingest.fault(W0)
    if batch is None:
        assert (effects, state, fault) == ([RequestSnapshot(W0)], SourceState.SYNCING, "")
    else:
        assert (effects, state) == ([], SourceState.UNVERIFIED if fault else SourceState.EXACT)

    assert ingest.snapshot(W0, 1, blocks(TRUTH), now_s=1.0) == []
    assert (exported(ingest, W0), ingest.cursor(W0).next_seq, ingest.fault(W0)) == (TRUTH, 2, fault)
    assert ingest.state(W0) is (SourceState.UNVERIFIED if fault else SourceState.EXACT)
    assert (exported(ingest, W1), ingest.state(W1)) == (HELD, SourceState.EXACT)
    ingest.check()
    if fault:
        assert any(reason in fault for reason in ("tagged dp_rank", "page size", "namespaced"))
    return "asks" if batch is None else "faulty" if fault else "exact"


@FORMS
def test_honest_batch_is_exact_and_attested(payload: bytes) -> None:
    ingest = followed()
    assert ingest.live(W0, SeqPayload(1, payload), now_s=1.0) == []
    attestor = ingest.attestor(W0)
    assert attestor is not None
    assert (attestor.num_attested, ingest.index.num_copies(W0), fate(payload)) == (2 - (payload is ARRAYS), 4, "exact")


@FORMS
def test_batch_that_ends_early_is_asked_for_at_any_byte(payload: bytes) -> None:
    assert {fate(payload[:end]) for end in range(len(payload))} == {"asks"}


@FORMS
@pytest.mark.parametrize("bit", range(8))
def test_any_flipped_bit_is_survived(payload: bytes, bit: int) -> None:
    fates: Counter[str] = Counter()
    for at in range(len(payload)):
        flipped = bytearray(payload)
        flipped[at] ^= 1 << bit
        fates[fate(bytes(flipped))] += 1
    assert fates["exact"]
    assert fates["asks"]


def with_marks() -> Iterator[tuple[str, bytes, bytes, bytes]]:
    """Each place of a batch: its name, the bytes before it, the value there, and the bytes after."""
    yield "batch", b"", MAPS, b""
    mark = "a mark that is nowhere else"
    places: list[tuple[str, Any, Any]] = [
        ("ts", 1.5, [mark, EVENTS, 0]),
        ("events", EVENTS, [1.5, mark, 0]),
        ("dp_rank", 0, [1.5, EVENTS, mark]),
        ("an event", EVENTS[1], [1.5, [mark, EVENTS[3]], 0]),
        ("an event, array", AS_ARRAYS[1], [1.5, [mark, EVENTS[3]], 0]),
        ("a hash", 5, [1.5, [EVENTS[1] | {"block_hashes": [1, mark, 2]}, EVENTS[3]], 0]),
        ("a token", 5, [1.5, [EVENTS[1] | {"token_ids": [1, mark, 2]}, EVENTS[3]], 0]),
    ]
    for at, (name, value) in enumerate(EVENTS[1].items()):
        places.append((name, value, [1.5, [EVENTS[1] | {name: mark}, EVENTS[3]], 0]))
        if at < len(AS_ARRAYS[1]):
            in_array = [*AS_ARRAYS[1][:at], mark, *AS_ARRAYS[1][at + 1 :]]
            places.append((f"{name}, array", value, [1.5, [in_array, AS_ARRAYS[3]], 0]))
    for name, value, batch in places:
        before, after = pack(batch).split(pack(mark))
        yield name, before, pack(value), after


PLACES = {name: parts for name, *parts in with_marks()}
HEADERS = {"str32": 0xDB, "bin32": 0xC6, "ext32": 0xC9, "array32": 0xDD, "map32": 0xDF}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_length_of_four_billion_is_never_believed(place: list[bytes], header: int) -> None:
    before, value, after = place
    for count in (0xFFFF_FFFF, 0x8000_0000, 0x7FFF_FFFF):
        lie = bytes([header]) + count.to_bytes(4, "big")
        fates = [fate(before + lie + rest) for rest in (b"", value[1:], value[1:] + after, value + after, bytes(400))]
        assert fates == ["asks"] * len(fates)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_noise_in_any_place_is_survived(place: list[bytes]) -> None:
    before, value, after = place
    rng = random.Random(7)
    for length in [*range(1, 10)] * 5:
        noise = rng.randbytes(length)
        fate(before + noise + after)
        fate(before + noise + value + after)


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(st.binary(max_size=300), st.integers(0, len(MAPS)), st.integers(0, len(MAPS)))
def test_any_bytes_are_survived(noise: bytes, start: int, end: int) -> None:
    fate(noise)
    fate(MAPS[:start] + noise[:20] + MAPS[end:])
