"""What the core decides, and why: values only, made to be shown."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from router.hashing import TOKEN_BYTES
from router.ids import LoraId, SourceId, WorkerId


class Reason(StrEnum):
    """Why a source was chosen, in a word."""

    CACHED_PREFIX = "cached-prefix"
    """It holds the longest prefix of the prompt."""
    SPILL = "spill"
    """Another holds more, but waiting there would cost more than computing it again."""
    SHARE = "share"
    """It stood idle and had been left out, as a new worker is while the others have what everybody asks for."""
    LEAST_LOADED = "least-loaded"
    """Nobody holds any of it."""
    SYNCING = "syncing"
    """What the chosen source holds isn't known yet."""
    UNVERIFIED = "unverified"
    """What the chosen source publishes can't be believed; `status` says why."""
    NOT_TOKENIZED = "not-tokenized"
    """The prompt can't be tokenized here (images, say), so nothing can be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """One request as the decision sees it."""

    packed_tokens: bytes | None
    """Prompt as `hashing.pack_tokens` gives it; None if it can't be tokenized here."""
    adapter: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    max_cached_tokens: int | None = None
    """The engine may reuse at most so many (asked for prompt logprobs, say); None for no limit of its own."""
    max_output_tokens: int | None = None
    """The client's limit; None for none."""
    now_s: float = 0.0
    """On the clock of the bookings."""
    exclude: Collection[WorkerId] = field(default=frozenset())
    """Workers that failed this request already."""

    @property
    def num_tokens(self) -> int:
        """Of the prompt; 0 where it isn't tokenized."""
        return len(self.packed_tokens or b"") // TOKEN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chosen source. `local_rank` is the rank that its own engine knows; `url` where it listens."""

    source: SourceId
    url: str
    local_rank: int | None
    """None where the engine has one rank only, and needn't be told."""
    column: int
    lora_id: LoraId | None
    adapter: str | None
    reason: Reason
    prompt_tokens: int | None
    predicted_cached_tokens: int | None
    uncached_tokens: int
    kv_tokens: int
    """What it will take of the KV cache beyond what is cached, output included."""
    num_slots: int
    capacity_tokens: int
    """Of its KV cache; 0 where unknown."""
    cost_ms: float
