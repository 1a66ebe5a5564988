"""What the core wants done by whoever holds sockets; its own state is changed already."""

from __future__ import annotations

from dataclasses import dataclass

from router.ids import SourceId


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Listen to a source's event stream; then ask for a replay from 0 as by `RequestReplay`."""

    source: SourceId
    endpoint: str
    replay_endpoint: str | None


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Stop listening; whatever is still queued of it is void."""

    source: SourceId


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask the engine for all batches from `from_seq`; answer with `ingest.replayed` or `replay_failed`."""

    source: SourceId
    from_seq: int


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Ask the worker for its mirror; answer with `ingest.snapshot` or `retry`."""

    source: SourceId


Effect = Subscribe | Unsubscribe | RequestReplay | RequestSnapshot
