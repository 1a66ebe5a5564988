"""Which adapters have requests at each column, and which were used there last: what its LoRA slots should hold."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from router.ids import LoraId
from router.terms import RECENT, RUNS


class SlotBook:
    """Adapters by column; None is the base model, which takes a slot while it runs and isn't swapped."""

    def __init__(self) -> None:
        #: by column, what adapters have requests there, and how many
        self.running: list[dict[LoraId | None, int]] = []
        #: by column, adapters in the order of their last use, the latest last
        self._recent: list[OrderedDict[LoraId, None]] = []
        self._recent_at: dict[LoraId, set[int]] = {}
        self._running_at: dict[LoraId | None, set[int]] = {}

    def widen(self, more: int) -> None:
        """Room for so many more columns."""
        self.running += [{} for _ in range(more)]
        self._recent += [OrderedDict() for _ in range(more)]

    def reset(self, column: int) -> None:
        """The column belongs to another source."""
        for lora_id in self.running[column]:
            self._leave(column, lora_id)
        self.running[column] = {}
        for recent in list(self._recent[column]):
            self._forget(column, recent)

    def enter(self, column: int, lora_id: LoraId | None, num_slots: int) -> int:
        """A request begins, where so many adapters run at once (0: any number); returns how many then run."""
        counts = self.running[column]
        counts[lora_id] = counts.get(lora_id, 0) + 1
        self._running_at.setdefault(lora_id, set()).add(column)
        if lora_id is not None and num_slots:
            recent = self._recent[column]
            recent[lora_id] = None
            recent.move_to_end(lora_id)
            self._recent_at.setdefault(lora_id, set()).add(column)
            while len(recent) > num_slots:
                self._forget(column, next(iter(recent)))
        return len(counts)

    def leave(self, column: int, lora_id: LoraId | None) -> int:
        """A request is over; returns how many adapters then run."""
        counts = self.running[column]
        counts[lora_id] -= 1
        if not counts[lora_id]:
            del counts[lora_id]
            self._leave(column, lora_id)
        return len(counts)

    def flags(self, lora_id: LoraId | None, columns: NDArray[np.int64]) -> NDArray[np.uint8]:
        """RUNS and RECENT of the adapter at each column."""
        flags = np.zeros(len(self.running), np.uint8)
        if running := self._running_at.get(lora_id):
            flags[list(running)] = RUNS
        if lora_id is not None and (recent := self._recent_at.get(lora_id)):
            flags[list(recent)] |= RECENT
        return flags[columns]

    def check(self) -> None:
        """Invariants; for tests."""
        assert all(count > 0 for counts in self.running for count in counts.values())
        assert {(c, a) for c, r in enumerate(self._recent) for a in r} == {
            (c, a) for a, at in self._recent_at.items() for c in at
        }
        assert {(c, a) for c, counts in enumerate(self.running) for a in counts} == {
            (c, a) for a, at in self._running_at.items() for c in at
        }

    def _leave(self, column: int, lora_id: LoraId | None) -> None:
        self._running_at[lora_id].discard(column)
        if not self._running_at[lora_id]:
            del self._running_at[lora_id]

    def _forget(self, column: int, lora_id: LoraId) -> None:
        del self._recent[column][lora_id]
        self._recent_at[lora_id].discard(column)
        if not self._recent_at[lora_id]:
            del self._recent_at[lora_id]
