"""The cost of sending a request to a source: milliseconds to its first token there, as a sum of named terms.

| term | what is waited for |
|---|---|
| prefill | computing the request's own uncached tokens |
| queue | prompts booked there before it |
| decode | running requests, a step of which comes first |
| slot | one adapter more than fit a batch: all requests of another must end |
| swap | the adapter's weights on their way from the host's memory to the GPU |
| memory | running requests must end before the prompt fits the KV cache |
| others | nothing of its own: what its computing takes from the requests after it |

More of the prompt cached never raises a cost, and more load never lowers one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import numpy as np
from numba import float64, int64, njit, uint8, void
from numpy.typing import NDArray

from router.ids import LoraId
from router.load import DISTINCT, FOREIGN, KV, RECENT, RUNNING, RUNS, LoadBook, queue_ms
from router.speed import curve_ms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TERMS: Final = ("prefill", "queue", "decode", "slot", "swap", "memory", "others")
NEAR_TIE_MS: Final = 0.5
NEAR_TIE_SHARE: Final = 0.01
"""Costs closer than this, or than so much of the least, are equal: an estimate isn't better than that."""

NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class CostWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `router.weights` of the configuration: what is assumed where nothing is measured."""

    prefill_tokens_per_s: Positive = 5000.0
    """Prefill speed of a worker until its own is measured."""
    overhead_ms: Positive = 5.0
    """Time to the first token of the shortest prompt, until measured."""
    decode_ms_per_request: NonNegative = 2.0
    """What each running request adds to the wait for a first token."""
    slot_wait_ms: NonNegative = 200.0
    """Wait for a LoRA slot where max_loras_per_batch adapters already run, until measured."""
    adapter_swap_ms: NonNegative = 20.0
    """From host memory into a slot."""
    adapter_load_ms: NonNegative = 1000.0
    """From storage into host memory, until measured; a holder that costs so much more than another gets company."""
    others_share: NonNegative = 0.25
    """What computing takes from requests that come after, as a share of its time."""
    request_ms: Positive = 5000.0
    """From first token to end, until measured."""
    output_tokens: Positive = 256.0
    """Output of a request, until measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request asks of each candidate; the arrays run parallel."""

    now_s: float
    uncached_tokens: Floats
    output_tokens: float
    lora_ids: Sequence[LoraId | None]
    num_slots: Ints
    """Adapters in one batch, 0 for any number."""
    capacity_tokens: Floats
    """Of the KV cache, infinite where unknown."""


class Costs:
    """Terms per candidate, in ms; column i belongs to candidate i."""

    __slots__ = ("_terms", "total")

    def __init__(self, terms: Floats) -> None:
        """`terms` as float64[len(TERMS), candidates]."""
        self._terms = terms
        self.total: Floats = terms.sum(axis=0)

    def row(self, i: int) -> dict[str, float]:
        """Terms of one candidate that aren't zero; they sum to its cost."""
        return {name: value for name, value in zip(TERMS, self._terms[:, i].tolist(), strict=True) if value}


def estimate(book: LoadBook, weights: CostWeights, columns: Ints, demand: Demand) -> Costs:
    """Costs of the candidates `columns`."""
    terms = np.empty((len(TERMS), len(columns)))
    own = set(demand.lora_ids)
    flags = book.flags(own.pop(), columns)
    for lora_id in own:  # workers that hold other weights under the name, for a moment
        is_its = np.array([one == lora_id for one in demand.lora_ids])
        flags[is_its] = book.flags(lora_id, columns[is_its])
    swap_ms = weights.adapter_swap_ms if any(demand.lora_ids) else 0.0
    assumed = np.array([
        demand.now_s, demand.output_tokens, weights.decode_ms_per_request, swap_ms, weights.others_share,
        book.slot_ms, book.request_ms,
    ])  # fmt: skip
    _terms(
        book.state, book.speed.log_ms, book.speed.factors, columns, flags,
        demand.uncached_tokens, demand.num_slots, demand.capacity_tokens, assumed, terms,
    )  # fmt: skip
    return Costs(terms)


@njit(
    void(
        float64[:, ::1], float64[::1], float64[::1], int64[::1], uint8[::1],
        float64[::1], int64[::1], float64[::1], float64[::1], float64[:, ::1],
    ),
    cache=True,
)  # fmt: skip
def _terms(state, curve, factors, columns, flags, uncached, num_slots, capacity, assumed, terms):  # type: ignore[no-untyped-def]  # numba compiles it, mypy cannot see its types
    """Fills `terms`, a row for each of TERMS. One pass: as many array operations would cost ten times as much."""
    now_s, output_tokens, decode_ms, swap_ms, others_share, slot_ms, request_ms = assumed
    for i in range(len(columns)):
        row = state[columns[i]]
        factor = factors[columns[i]]
        prefill = factor * curve_ms(curve, uncached[i])
        terms[0, i] = prefill
        terms[1, i] = queue_ms(row, now_s)
        terms[2, i] = max(0.0, row[RUNNING] + row[FOREIGN]) * decode_ms
        over = 0.0 if flags[i] & RUNS or num_slots[i] == 0 else max(0.0, row[DISTINCT] + 1 - num_slots[i])
        terms[3, i] = over * slot_ms
        terms[4, i] = 0.0 if flags[i] & RECENT else swap_ms
        missing = row[KV] + min(uncached[i] + output_tokens, capacity[i]) - capacity[i]
        terms[5, i] = request_ms * missing / min(row[KV], capacity[i]) if missing > 0 and row[KV] > 0 else 0.0
        terms[6, i] = prefill * others_share
