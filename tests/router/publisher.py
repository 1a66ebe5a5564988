"""A naive engine: what one source publishes, batch by batch, and what it holds after each. For tests of the ingest."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.cursor import SeqPayload
from router.events import Tier
from router.ids import DpRank, Incarnation, SourceId, WorkerId
from router.ingest import EventIngest
from router.table import Hashes, as_keys

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
Event = tuple[str, Tier, list[int]]
"""Type, tier, hashes."""
Held = dict[Tier, Counter[int]]
"""What an engine holds: how often each hash, by tier; tiers that hold nothing are left out."""


def source(worker: int, rank: int = 0, life: int = 1) -> SourceId:
    return SourceId(WorkerId(f"w{worker}"), Incarnation(f"i{life}"), DpRank(rank))


def encode(rank: int, *events: Event) -> bytes:
    """A batch as SGLang sends it."""
    prompt: dict[str, Any] = {"parent_block_hash": None, "token_ids": [], "block_size": 4, "lora_id": None}
    more = {STORED: prompt, REMOVED: {}}
    wire = [
        {"type": kind} if kind == CLEARED else {"type": kind, "block_hashes": hashes, **more[kind], "medium": tier}
        for kind, tier, hashes in events
    ]
    return msgspec.msgpack.encode([1.0, wire, rank])


def after(held: Held, *events: Event) -> Held:
    """What an engine that held `held` holds after `events`."""
    counts = {tier: Counter(held.get(tier, ())) for tier in Tier}
    for kind, tier, hashes in events:
        if kind == CLEARED:
            counts = {tier: Counter() for tier in Tier}
            continue
        for value in hashes:
            key = value & ((1 << 64) - 1)
            counts[tier][key] = max(0, counts[tier][key] + (1 if kind == STORED else -1))
    return {tier: +counter for tier, counter in counts.items() if +counter}


def random_batch(rng: random.Random) -> list[Event]:
    """Few hashes, so that they repeat, and are removed more often than stored."""
    kinds = rng.choices([STORED, REMOVED, CLEARED], [12, 10, 1], k=rng.randint(0, 4))
    tiers = [Tier.GPU, Tier.GPU, *Tier]
    return [(kind, rng.choice(tiers), rng.choices([0, 1, -1, -(1 << 63)], k=rng.randint(1, 5))) for kind in kinds]


def blocks(held: Held) -> dict[Tier, Hashes]:
    """As a snapshot tells it."""
    return {tier: as_keys(list(counter.elements())) for tier, counter in held.items()}


def exported(ingest: EventIngest, of: SourceId) -> Held:
    """What the index holds."""
    return {tier: Counter(hashes.tolist()) for tier, hashes in ingest.index.export(of).items()}


@dataclass
class Publisher:
    """One source's engine."""

    source: SourceId
    log: list[SeqPayload] = field(default_factory=list)
    #: held[n]: after n batches
    held: list[Held] = field(default_factory=lambda: [{}])

    def publish(self, *events: Event) -> SeqPayload:
        self.held.append(after(self.held[-1], *events))
        self.log.append(SeqPayload(len(self.log), encode(self.source.dp_rank, *events)))
        return self.log[-1]
