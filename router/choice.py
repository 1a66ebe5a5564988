"""The choice among candidates by their costs, and a log of choices that can be made again. Pure.

A choice depends on nothing but what its log entry says: costs, running requests, the router's seed and the entry's
number. So a recorded log can be replayed, and `replay` says whether today's code would choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.cost import NEAR_TIE_MS, NEAR_TIE_SHARE

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
MAX_SHARE_MS: Final = 1000.0
"""What a request may pay so that a source that was left out gets its share."""
MIN_SENT: Final = 2.0
"""Requests sent lately, on average, before anybody is left out."""
_WORD: Final = (1 << 64) - 1


def left_out(cached: Floats, running: Floats, sent: Floats) -> Bools:
    """Sources that stand idle and were sent less than half of the others' mean lately, by `sent`.

    By the least time to first token alone, a new or emptied worker never gets a request whose beginning the others have
    cached: none pays first for all that come after. None where the request is one source's alone to answer, as a
    conversation is: where a single one holds most of its cached tokens.
    """
    mean = float(sent.mean())
    most = float(cached.max())
    if mean < MIN_SENT or (most and np.count_nonzero(cached * 2 >= most) < 2):
        return np.zeros(len(sent), bool)
    out: Bools = (running == 0) & (sent * 2 < mean)
    return out


def choose(total_ms: Floats, running: Floats, out: Bools, *, seed: int, number: int) -> int:
    """Index of the least cost; near ties go to the fewest running requests, then by lot.

    Among those left `out`, where one costs no more than MAX_SHARE_MS over the least. `seed` and `number` (of the
    decision) draw the lot, so that it can be drawn again.
    """
    least = float(total_ms.min())
    if out.any() and (due := out & (total_ms <= least + MAX_SHARE_MS)).any():
        total_ms = np.where(due, total_ms, np.inf)
        least = float(total_ms.min())
    near = np.flatnonzero(total_ms <= least + max(NEAR_TIE_MS, least * NEAR_TIE_SHARE))
    if len(near) > 1:
        fewest = running[near]
        near = near[fewest == fewest.min()]
    return int(near[_lot(seed, number) % len(near)])


class LoggedCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A source as it was weighed. `terms_ms` sum to its cost; those that are zero are left out."""

    worker: str
    dp_rank: int
    state: str
    predicted_cached_tokens: int | None
    running: float
    left_out: bool = False
    terms_ms: dict[str, float]


class LoggedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision: all that it depended on, and what it was."""

    number: int
    at_s: float
    """On the router's monotonic clock."""
    adapter: str | None
    prompt_tokens: int | None
    reason: str
    chosen: int
    """Index of the candidate."""
    candidates: list[LoggedCandidate]


def replay(log: Sequence[LoggedDecision], *, seed: int) -> list[int]:
    """Numbers of the decisions that would be others now; none where all are the same."""
    others = []
    for entry in log:
        total = np.array([_total(one.terms_ms) for one in entry.candidates])
        running = np.array([one.running for one in entry.candidates])
        out = np.array([one.left_out for one in entry.candidates])
        if choose(total, running, out, seed=seed, number=entry.number) != entry.chosen:
            others.append(entry.number)
    return others


def _total(terms_ms: dict[str, float]) -> float:
    """Rounded after each term, as costs are added up; Python's own `sum` isn't from 3.12 on."""
    total = 0.0
    for term_ms in terms_ms.values():
        total += term_ms
    return total


def _lot(seed: int, number: int) -> int:
    """SplitMix64: as good as random, and the same each time."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)
