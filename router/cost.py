"""The cost of sending a request to a source: milliseconds to its first token there, as a sum of named terms.

| term | what is waited for |
|---|---|
| prefill | computing the request's own uncached tokens |
| queue | prompts booked there before it |
| decode | a decode step of what runs there, which comes first |
| slot | one adapter more than fit a batch: all requests of another must end |
| swap | the adapter's weights on their way from the host's memory to the GPU |
| memory | running requests must end before the prompt fits the KV cache |
| batch | running requests must end before there is a place in the batch |
| others | nothing of its own: what computing it takes from the requests after it, and storing it from the cache |

More of the prompt cached never raises a cost, and more load never lowers one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.ids import LoraId
from router.load import LoadBook
from router.terms import OF_RUNNING, TERMS, TOTAL, fill_terms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class CostWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `router.weights` of the configuration: what is assumed where nothing is measured."""

    prefill_tokens_per_s: Positive = 5000.0
    """Prefill speed of a worker until its own is measured."""
    overhead_ms: Positive = 5.0
    """Time to the first token of the shortest prompt, until measured."""
    decode_step_ms: Positive = 10.0
    """A decode step of one request, until measured."""
    slot_wait_ms: NonNegative = 200.0
    """Wait for a LoRA slot where max_loras_per_batch adapters already run, until measured."""
    adapter_swap_ms: NonNegative = 20.0
    """From host memory into a slot."""
    adapter_load_ms: NonNegative = 1000.0
    """From storage into host memory, until measured; a holder that costs so much more than another gets company."""
    others_share: NonNegative = 0.25
    """What computing takes from requests that come after, as a share of its time; and what storing pushes out of the
    cache, as much again for each time that it was filled lately."""
    request_ms: Positive = 5000.0
    """From first token to end, until measured."""
    output_tokens: Positive = 256.0
    """Output of a request, until measured."""


@dataclass(slots=True, kw_only=True)
class Demand:
    """What a request asks of each candidate; the arrays run parallel."""

    now_s: float
    num_tokens: int
    cached_tokens: Ints
    """Below 0 where unknown, which counts as none."""
    output_tokens: float
    lora_ids: Sequence[LoraId | None]
    num_slots: Ints
    """Adapters in one batch, 0 for any number."""
    capacity_tokens: Floats
    """Of the KV cache, infinite where unknown."""
    max_running: Floats
    """Requests in one batch, infinite where unknown."""


class Costs:
    """Terms per candidate, in ms; column i belongs to candidate i."""

    __slots__ = ("_rows", "running", "total")

    def __init__(self, rows: Floats) -> None:
        """`rows` as float64[len(TERMS) + 2, candidates]: the terms, their sum, and running requests."""
        self._rows = rows
        self.total: Floats = rows[TOTAL]
        #: requests that run or wait at each candidate, wherever they come from
        self.running: Floats = rows[OF_RUNNING]

    def row(self, i: int) -> dict[str, float]:
        """Terms of one candidate that aren't zero; they sum to its cost."""
        return {name: value for name, value in zip(TERMS, self._rows[:TOTAL, i].tolist(), strict=True) if value}


def estimate(book: LoadBook, weights: CostWeights, columns: Ints, demand: Demand) -> Costs:
    """Costs of the candidates `columns`."""
    rows = np.empty((len(TERMS) + 2, len(columns)))
    lora_id = demand.lora_ids[0]
    flags = book.slots.flags(lora_id, columns)
    if lora_id is not None:
        for other in set(demand.lora_ids) - {lora_id}:  # workers that hold other weights under the name, for a moment
            is_its = np.array([one == other for one in demand.lora_ids])
            flags[is_its] = book.slots.flags(other, columns[is_its])
    swap_ms = weights.adapter_swap_ms if lora_id is not None else 0.0
    assumed = np.array([
        demand.now_s, demand.num_tokens, demand.output_tokens, swap_ms, weights.others_share, book.slot_ms,
        book.request_ms,
    ])  # fmt: skip
    fill_terms(
        book.state, book.speed.log_ms, book.speed.factors, book.decode.model, columns, flags,
        demand.cached_tokens, demand.num_slots, demand.capacity_tokens, demand.max_running, assumed, rows,
    )  # fmt: skip
    return Costs(rows)
