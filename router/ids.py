"""Identifiers that cross module borders. A source names one event stream of one engine life."""

from __future__ import annotations

from typing import NamedTuple, NewType

WorkerId = NewType("WorkerId", str)
"""Stable in a deployment: `w0`, `w1`, ..."""

Incarnation = NewType("Incarnation", str)
"""One life of a worker's engine process; never reused."""

DpRank = NewType("DpRank", int)
"""Fleet-wide data-parallel rank of one KV cache."""

LoraId = NewType("LoraId", str)
"""32 hex characters that SGLang appends to a request's extra_key."""


class SourceId(NamedTuple):
    """One KV cache of one engine life; the unit that events and predictions belong to.

    A tuple, since it is hashed for every batch of events.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    dp_rank: DpRank

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.incarnation}/r{self.dp_rank}"
