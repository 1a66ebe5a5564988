"""The cost of sending a request to a source: milliseconds to its first token there, as a sum of named terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.ids import LoraId
from router.load import LoadBook

Floats = NDArray[np.float64]
NEAR_TIE_MS: Final = 0.5
"""Costs closer than this are equal: an estimate isn't better than that."""

NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class CostWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `router.weights` of the configuration: what is assumed where nothing is measured."""

    prefill_tokens_per_s: Positive = 5000.0
    """Prefill speed of a worker until its own is measured."""
    decode_ms_per_request: NonNegative = 2.0
    """What each running request adds to the wait for a first token."""
    slot_wait_ms: NonNegative = 200.0
    """Wait for a LoRA slot where max_loras_per_batch adapters already run."""
    adapter_load_ms: NonNegative = 1000.0
    """What loading an adapter takes; a holder that costs so much more than another worker gets company."""


class Costs:
    """Terms per candidate, in ms; row i belongs to candidate i."""

    __slots__ = ("terms", "total")

    def __init__(self, terms: dict[str, Floats]) -> None:
        self.terms = terms
        self.total: Floats = sum(terms.values(), start=np.zeros(()))

    def row(self, i: int) -> dict[str, float]:
        """Terms of one candidate; they sum to its cost."""
        return {name: round(float(values[i]), 3) for name, values in self.terms.items()}


def estimate(
    book: LoadBook,
    weights: CostWeights,
    columns: NDArray[np.int64],
    *,
    uncached_tokens: Floats,
    lora_ids: Sequence[LoraId | None],
    num_slots: NDArray[np.int64],
) -> Costs:
    """Costs of the candidates `columns`; arrays run parallel to it. `num_slots` 0 means unlimited."""
    rate = book.tokens_per_ms[columns]
    terms: dict[str, Floats] = {
        "prefill": uncached_tokens / rate,
        "queue": book.queued_tokens[columns] / rate,
        "decode": book.running[columns].astype(np.float64) * weights.decode_ms_per_request,
    }
    if any(lora_ids):
        full = [
            lora_id not in book.adapters[column] and 0 < slots <= len(book.adapters[column])
            for column, slots, lora_id in zip(columns.tolist(), num_slots.tolist(), lora_ids, strict=True)
        ]
        terms["slot"] = np.array(full, np.float64) * weights.slot_wait_ms
    return Costs(terms)
