"""The KV-event wire: bytes of one batch -> typed events. SGLang owns the format; unknown keys are tolerated.

Payload: msgpack array [ts, events, dp_rank]; an event is a map tagged by `type` (since 0.5.23) or an array led by
its type (older). Block hashes stay raw msgpack: the table reads them without building Python integers, and
token_ids are skipped altogether. Source: sglang.srt.disaggregation.kv_events.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Final

import msgspec

from router.errors import EventDecodeError


class Tier(StrEnum):
    """Storage medium of a block, as SGLang names it."""

    GPU = "GPU"
    CPU = "CPU_PINNED"
    DISK = "DISK"
    EXTERNAL = "EXTERNAL"


class Stored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Blocks that the engine now holds. `lora_name` as the engine knows it; the hashes tell more, see hashing."""

    block_hashes: msgspec.Raw
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


class Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """Blocks that the engine holds no longer."""

    block_hashes: msgspec.Raw
    medium: str | None = None


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The engine's whole cache is gone: all adapters, all tiers, this rank."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    """One decoded batch. `ts` is the engine's clock in seconds."""

    ts: float
    events: list[Event]
    dp_rank: int | None = None

    num_bad: ClassVar[int] = 0
    """Events that were unreadable and left out."""


class DamagedBatch(Batch, gc=False):
    """A batch of which a part was left out."""

    num_left_out: int = 0

    @property
    def num_bad(self) -> int:  # type: ignore[override]  # read-only in both
        """See Batch."""
        return self.num_left_out


class _Envelope(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    dp_rank: int | None = None


_decode_batch = msgspec.msgpack.Decoder(Batch).decode
_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_event = msgspec.msgpack.Decoder(Event).decode
_decode_array = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_tag = msgspec.msgpack.Decoder(str).decode
#: what decoding raises; the latter at thousands of arrays in arrays
_UNREADABLE = (msgspec.MsgspecError, RecursionError)

ARRAY_FIELDS: Final = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Fields of the array form, by type, in order (SGLang before 0.5.23)."""


def decode_batch(payload: bytes) -> Batch:
    """Decode one batch. An unreadable event is counted and left out, the others stand.

    Raises:
        EventDecodeError: the payload isn't a batch at all.
    """
    try:
        return _decode_batch(payload)
    except _UNREADABLE:
        return _decode_one_by_one(payload)


def _decode_one_by_one(payload: bytes) -> Batch:
    try:
        envelope = _decode_envelope(payload)
    except _UNREADABLE as exc:
        raise EventDecodeError(f"not an event batch ({len(payload)} bytes): {exc}") from exc
    events: list[Event] = []
    for raw in envelope.events:
        try:
            events.append(_decode_any(raw))
        except _UNREADABLE:
            continue
    num_bad = len(envelope.events) - len(events)
    return DamagedBatch(envelope.ts, events, envelope.dp_rank, num_bad)


def _decode_any(raw: msgspec.Raw) -> Event:
    kind = bytes(memoryview(raw)[:1])[0]
    if not (0x90 <= kind <= 0x9F or kind in (0xDC, 0xDD)):
        return _decode_event(raw)
    tag, *values = _decode_array(raw) or [msgspec.Raw(b"\xc0")]  # an empty array has no tag, which nil isn't either
    name = _decode_tag(tag)
    if name not in ARRAY_FIELDS:
        raise msgspec.ValidationError(f"unknown event {name!r}")
    fields: dict[str, Any] = {"type": name, **dict(zip(ARRAY_FIELDS[name], values, strict=False))}
    return _decode_event(msgspec.msgpack.encode(fields))
