"""What the catalogue knows of an adapter, as it is configured, asked for at run time, and kept on disk."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec


class Placement(StrEnum):
    """Which workers are to hold an adapter."""

    EVERYWHERE = "everywhere"
    REPLICAS = "replicas"
    ON_DEMAND = "on_demand"


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter as a user names it: its source and where it shall be."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    """Folder, file:// URI, hf://org/repo[@revision][/folder], or any URI that fsspec reads."""
    placement: Placement | None = None
    """None: everywhere if all adapters fit on every worker, else on demand."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    """Workers that hold it: exactly (`replicas`), at least once it was asked for (`on_demand`)."""
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    """On demand, no more workers than these; None for all."""
    pinned: bool = False
    """Once loaded, never unloaded to make room for another."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of the catalogue. `content_id` decides what is loaded: another one makes every copy stale."""

    name: str
    source: str
    placement: Placement
    content_id: str
    replicas: int = 1
    max_replicas: int | None = None
    pinned: bool = False
    size_bytes: int = 0


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is to hold of one adapter."""

    name: str
    source: str
    content_id: str
    pinned: bool = False


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """All that one worker is to hold. `revision` grows with every change within an `epoch` of the table."""

    epoch: str
    revision: int
    wanted: tuple[Wanted, ...] = ()
