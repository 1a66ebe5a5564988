"""Whether an event stream is still the one it was, told from its replay alone. For sources that nobody reports on.

An engine that was restarted on the same address starts its sequence again at 0, and no message says so. But a batch
carries its time: the same seq with other bytes is another life, and so is a stream that ends before where we are.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from router.cursor import SeqPayload


class Continuity(StrEnum):
    """What a replay from the last applied batch says of the stream."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"
    """The replay ring starts behind our position: more was missed than it holds."""


def judge(next_seq: int, last: SeqPayload | None, replay: Sequence[SeqPayload]) -> Continuity:
    """`next_seq`: ours, -1 before the first batch; `last`: the last batch applied, None if it came by a snapshot.

    `replay`: the first batches of the engine's answer from `next_seq - 1`, ascending.
    """
    if next_seq <= 0:
        return Continuity.SAME
    if not replay:
        return Continuity.OTHER
    first = replay[0]
    if first.seq >= next_seq:
        return Continuity.UNKNOWN
    if last is not None and last.seq == first.seq and last.payload != first.payload:
        return Continuity.OTHER
    return Continuity.SAME
