"""Who may serve an adapter, and all about them that stays the same from one request to the next. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.attestation import HashForm
from router.ids import LoraId, SourceId, WorkerId
from router.predict import Group, Place, grouped
from router.reports import WorkerReport


@dataclass(slots=True)
class WorkerRecord:
    """A worker's latest report and its sources, in the order of its ranks."""

    report: WorkerReport
    form: HashForm
    adapters: dict[str, LoraId]
    """Adapters that its engine holds now."""
    sources: tuple[SourceId, ...] = ()
    silent: bool = False
    """Unheard for a while: asked last, and nothing is predicted for it."""
    suspended: bool = False
    """It fails or stands still: asked last until a probe finds it well."""
    max_running: int = 0
    """Requests in a batch of one rank, as its engine says; 0 where unknown."""


@dataclass(frozen=True, slots=True)
class Target:
    """A source that requests may go to."""

    record: WorkerRecord
    source: SourceId
    column: int


@dataclass(frozen=True, slots=True)
class Holders:
    """Sources that hold an adapter, or all for the base model; everything runs parallel to `targets`."""

    targets: tuple[Target, ...]
    lora_ids: tuple[LoraId | None, ...]
    columns: NDArray[np.int64]
    groups: tuple[Group, ...]
    heard: NDArray[np.bool_]
    all_dynamo: bool
    num_slots: NDArray[np.int64]
    """Adapters in one batch, 0 for any number."""
    capacity_tokens: NDArray[np.float64]
    """Of the KV cache, infinite where unknown."""
    max_running: NDArray[np.float64]
    """Requests in one batch, infinite where unknown."""

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All of them, to compare."""
        return self.columns, self.heard, self.num_slots, self.capacity_tokens, self.max_running

    @classmethod
    def of(cls, targets: Sequence[Target], adapter: str | None, exclude: Collection[WorkerId] = ()) -> Holders:
        """Those of `targets` that hold `adapter` and aren't excluded."""
        held = [
            (target, None if adapter is None else target.record.adapters[adapter])
            for target in targets
            if (adapter is None or adapter in target.record.adapters) and target.source.worker_id not in exclude
        ]
        reports = [target.record.report for target, _ in held]
        places = [Place(target.column, target.record.form, lora_id) for target, lora_id in held]
        return cls(
            targets=tuple(target for target, _ in held),
            lora_ids=tuple(lora_id for _, lora_id in held),
            columns=np.array([place.column for place in places], np.int64),
            groups=grouped(places),
            heard=np.array([not target.record.silent for target, _ in held], bool),
            all_dynamo=all(place.form.dynamo for place in places),
            num_slots=np.array([report.max_loras_per_batch for report in reports], np.int64),
            capacity_tokens=np.array([report.max_total_tokens or np.inf for report in reports], np.float64),
            max_running=np.array([target.record.max_running or np.inf for target, _ in held], np.float64),
        )
