"""The terms of a cost, compiled, and the layout of the arrays that they are made from. Called for each decision.

Numba keeps what it has compiled until its file changes, and doesn't look into others: so all that is compiled into a
function lies in this file, its constants too (tests/test_project.py).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numba import bool_, float64, int64, njit, uint8, void

TERMS: Final = ("prefill", "queue", "decode", "slot", "swap", "memory", "batch", "others")
TOTAL: Final = len(TERMS)
OF_RUNNING: Final = TOTAL + 1
"""Rows of `fill_terms`: the terms, their sum, and running requests."""

QUEUED, QUEUED_MS, PROGRESS_S, RUNNING, KV, CONTEXT, DISTINCT, FOREIGN, SENT, FILLED, SENT_S, DONE_MS = range(12)
NUM_FIELDS: Final = DONE_MS + 1
"""Fields of `LoadBook.state`."""
SENT_HALF_LIFE_S: Final = 20.0
FILLED_HALF_LIFE_S: Final = 120.0
"""About as long as a cache lasts under load."""
MIN_QUEUE_SHARE: Final = 0.05
"""A queue that is overdue isn't gone: its source is slower than thought, or stands still."""

FIRST: Final = 4
"""log2 of the first knot's tokens: 16, below which prompts time the HTTP stack."""
NUM_KNOTS: Final = 14
"""The last knot is at 131,072 tokens; beyond it the cost grows with the length."""
LN_2: Final = math.log(2.0)

RUNS: Final = 1
"""`SlotBook.flags`: requests of the adapter run there."""
RECENT: Final = 2
"""It is among the last that as many slots hold."""


@njit(float64(float64[::1], float64), cache=True)
def curve_ms(log_ms, tokens):  # type: ignore[no-untyped-def]  # numba compiles it, mypy cannot see its types
    """Milliseconds until `tokens` are computed, by the logarithms at the knots; 0 for none."""
    if tokens <= 0:
        return 0.0
    at = max(math.log2(tokens) - FIRST, 0.0)
    knot = min(int(at), NUM_KNOTS - 2)
    share = min(at - knot, 1.0)
    beyond = max(at - knot - 1.0, 0.0)
    return math.exp(log_ms[knot] + share * (log_ms[knot + 1] - log_ms[knot]) + beyond * LN_2)


@njit(float64(float64[::1], float64, float64), cache=True)
def step_ms(model, requests, context_tokens):  # type: ignore[no-untyped-def]  # numba compiles it, mypy cannot see its types
    """A step by `DecodeBook.model`; 0 where nothing runs."""
    if requests <= 0:
        return 0.0
    return model[0] + model[1] * requests + model[2] * context_tokens


@njit(float64(float64[::1], float64), cache=True)
def queue_ms(row, now_s):  # type: ignore[no-untyped-def]  # numba compiles it, mypy cannot see its types
    """What is left of the prompts that wait, by a row of `LoadBook.state`."""
    return max(row[QUEUED_MS] - max(0.0, now_s - row[PROGRESS_S]) * 1000, row[QUEUED_MS] * MIN_QUEUE_SHARE)


@njit(float64(float64[::1], float64), cache=True)
def filled_tokens(row, now_s):  # type: ignore[no-untyped-def]
    """Tokens that requests sent lately leave in the cache, older ones counting for less, by a row of `state`."""
    return row[FILLED] * 2.0 ** (-max(0.0, now_s - row[SENT_S]) / FILLED_HALF_LIFE_S)


@njit(float64[::1](float64[:, ::1], int64[::1], float64), cache=True)
def sent_lately(state, columns, now_s):  # type: ignore[no-untyped-def]  # numba compiles it, mypy cannot see its types
    """Requests sent to each of `columns` lately, older ones counting for less."""
    sent = np.empty(len(columns))
    for i in range(len(columns)):
        row = state[columns[i]]
        sent[i] = row[SENT] * 2.0 ** (-max(0.0, now_s - row[SENT_S]) / SENT_HALF_LIFE_S)
    return sent


@njit(bool_(float64[:, ::1], int64[::1], float64[::1], float64[::1], float64, float64), cache=True)
def any_room(state, columns, max_running, capacity, now_s, max_queue_ms):  # type: ignore[no-untyped-def]  # numba compiles it, mypy cannot see its types
    """Whether a request sent to one of `columns` now would soon be computed there, not only wait."""
    for i in range(len(columns)):
        row = state[columns[i]]
        has_place = row[RUNNING] + row[FOREIGN] < max_running[i] and row[KV] < capacity[i]
        if has_place and queue_ms(row, now_s) <= max_queue_ms:
            return True
    return False


@njit(
    void(
        float64[:, ::1], float64[::1], float64[::1], float64[::1], int64[::1], uint8[::1],
        int64[::1], int64[::1], float64[::1], float64[::1], float64[::1], float64[:, ::1],
    ),
    cache=True,
)  # fmt: skip
def fill_terms(state, curve, factors, decode, columns, flags, cached, num_slots, capacity, max_running, assumed, rows):  # type: ignore[no-untyped-def]  # numba compiles it, mypy cannot see its types
    """Fills `rows`, see Costs. One pass: as many array operations would cost ten times as much."""
    now_s, num_tokens, output_tokens, swap_ms, others_share, slot_ms, request_ms = assumed
    for i in range(len(columns)):
        row = state[columns[i]]
        factor = factors[columns[i]]
        running = max(0.0, row[RUNNING] + row[FOREIGN])
        uncached = num_tokens - max(cached[i], 0)
        prefill = factor * curve_ms(curve, uncached)
        rows[0, i] = prefill
        rows[1, i] = queue_ms(row, now_s)
        rows[2, i] = factor * step_ms(decode, running, row[CONTEXT])
        over = 0.0 if flags[i] & RUNS or num_slots[i] == 0 else max(0.0, row[DISTINCT] + 1 - num_slots[i])
        rows[3, i] = over * slot_ms
        rows[4, i] = 0.0 if flags[i] & RECENT else swap_ms
        missing = row[KV] + min(uncached + output_tokens, capacity[i]) - capacity[i]
        rows[5, i] = request_ms * missing / min(row[KV], capacity[i]) if missing > 0 and row[KV] > 0 else 0.0
        stored = max(0.0, prefill - factor * curve_ms(curve, 1.0))  # less what any prompt takes, whatever its length
        too_many = running + 1 - max_running[i]
        rows[6, i] = request_ms * too_many / max_running[i] if too_many > 0 else 0.0
        rows[7, i] = others_share * (prefill + stored * filled_tokens(row, now_s) / capacity[i])
        total = 0.0
        for term in range(TOTAL):
            total += rows[term, i]
        rows[TOTAL, i] = total
        rows[OF_RUNNING, i] = running
