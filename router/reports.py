"""What workers and the LoRA table tell routers. Our own frames: fields are only ever appended, with defaults.

A WorkerReport is a worker's heartbeat; a TableView is a whole copy of the adapter table at one version. Both are
complete states, not deltas: the latest one wins and a lost one costs nothing.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from router.ids import DpRank, Incarnation, LoraId, WorkerId


class WorkerState(StrEnum):
    """Life of a worker as its actor sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class AdapterState(StrEnum):
    """State of one adapter on one worker."""

    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"
    UNLOADING = "unloading"
    """To be given up: no new request goes there."""


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of one rank's load (SGLang's /v1/loads)."""

    running: int
    waiting: int
    used_tokens: int = 0
    """Of the KV cache, what is only cached apart."""
    max_running: int = 0
    """Requests in a batch at most; 0 where unknown."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache of a worker: where it publishes, and how far it is."""

    dp_rank: DpRank
    endpoint: str
    replay_endpoint: str | None = None
    last_seq: int | None = None
    """Sequence number of the last batch that the worker itself has seen; None before the first."""
    load: RankLoad | None = None
    """A second old at most; None where the engine doesn't tell."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeat of a worker. Describes the engine life `incarnation` and no other."""

    worker_id: WorkerId
    incarnation: Incarnation
    state: WorkerState
    url: str = ""
    """Base URL of the SGLang server, without a trailing slash; empty while starting."""
    ranks: tuple[RankReport, ...] = ()
    page_size: int = 0
    context_length: int = 0
    """Longest prompt plus output in tokens."""
    max_total_tokens: int = 0
    """Tokens the KV cache of one rank can hold."""
    max_loras_per_batch: int = 0
    dynamo_format: bool = True
    snapshot_endpoint: str = ""
    """Where the worker's mirror answers, see `Snapshot`; empty for none."""
    bigram: bool = False
    """Whether the engine hashes pairs of tokens (speculative decoding)."""
    fault: str = ""
    """Why the engine's events can't be predicted from, as its worker found out; empty for no reason."""
    table_epoch: str = ""
    table_version: int = -1
    """The LoRA table as it stood when it last took this worker's holdings: a router with an older copy is behind."""


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a serving worker can hold, for the table's placing."""

    capacity: int
    """Adapters that its engine keeps loaded at most."""
    slots: int
    """Adapters that run in one batch."""
    capacity_bytes: int = 0
    """Size of all loaded adapters together; 0 for no limit."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the aggregated LoRANameTable: what a worker's engine calls an adapter."""

    worker_id: WorkerId
    incarnation: Incarnation
    lora_id: LoraId
    name: str
    content_id: str
    state: AdapterState
    error: str = ""
    load_s: float = 0.0
    """How long its engine took to load it, files included."""


class TableVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A point in the LoRA table's history."""

    epoch: str
    version: int


class TableView(msgspec.Struct, frozen=True, kw_only=True):
    """Copy of the LoRA table. Versions of one epoch only grow; a restarted table has a new epoch."""

    epoch: str
    version: int
    names: tuple[str, ...] = ()
    """The catalogue: adapters that the deployment offers, loaded anywhere or not."""
    holdings: tuple[Holding, ...] = ()


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a worker for its mirror of one source."""

    incarnation: Incarnation
    dp_rank: DpRank


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All blocks of one source after batch `last_seq` (-1: before the first), as a worker's mirror has them."""

    incarnation: Incarnation
    dp_rank: DpRank
    last_seq: int
    blocks: dict[str, bytes]
    """Tier -> hashes as 8-byte little-endian words, a hash as often as it was stored."""
    error: str = ""
    """Why there is none; the other fields mean nothing then."""
