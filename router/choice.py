"""The choice among candidates by their costs, and a log of choices that can be made again. Pure.

A choice depends on nothing but what its log entry says: costs, running requests, cached tokens, the router's seed and
the entry's number. So a recorded log can be replayed, and `replay` says whether today's code would choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numba import bool_, float64, int64, njit, uint64
from numpy.typing import NDArray

from router.predict import UNKNOWN

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NEAR_TIE_MS: Final = 0.5
NEAR_TIE_SHARE: Final = 0.01
"""Costs closer than this, or than so much of the least, are equal: an estimate isn't better than that."""
MAX_SHARE_MS: Final = 1000.0
"""What a request may pay so that a source that was left out gets its share."""
MIN_SENT: Final = 2.0
"""Requests sent lately, on average, before anybody is left out."""
_WORD: Final = (1 << 64) - 1


@njit(bool_[::1](int64[::1], float64[::1], float64[::1]), cache=True)
def left_out(cached, running, sent):  # type: ignore[no-untyped-def]  # numba compiles it, mypy cannot see its types
    """Sources that stand idle and were sent less than half of the others' mean lately, by `sent`.

    By the least time to first token alone, a new or emptied worker never gets a request whose beginning the others have
    cached: none pays first for all that come after. None where the request is one source's alone to answer, as a
    conversation is: where a single one holds most of its cached tokens.
    """
    out = np.zeros(len(sent), np.bool_)
    mean = sent.mean()
    most = cached.max()
    if mean < MIN_SENT or (most > 0 and (cached * 2 >= most).sum() < 2):
        return out
    for i in range(len(sent)):
        out[i] = running[i] == 0 and sent[i] * 2 < mean
    return out


def choose(total_ms: Floats, running: Floats, cached: Ints, out: Bools, *, seed: int, number: int) -> int:
    """Index of the least cost; near ties go to the fewest running requests, then to the most cached, then by lot.

    Among those left `out`, where one costs no more than MAX_SHARE_MS over the least. `seed` and `number` (of the
    decision) draw the lot, so that it can be drawn again.
    """
    return int(_choose(total_ms, running, cached, out, _lot(seed, number)))


@njit(int64(float64[::1], float64[::1], int64[::1], bool_[::1], uint64), cache=True)
def _choose(total_ms, running, cached, out, lot):  # type: ignore[no-untyped-def]  # numba compiles it, mypy cannot see its types
    due = out & (total_ms <= total_ms.min() + MAX_SHARE_MS)
    if not due.any():
        due[:] = True
    least = np.inf
    for i in range(len(due)):
        if due[i]:
            least = min(least, total_ms[i])
    due &= total_ms <= least + max(NEAR_TIE_MS, least * NEAR_TIE_SHARE)
    fewest = np.inf
    for i in range(len(due)):
        if due[i]:
            fewest = min(fewest, running[i])
    due &= running == fewest
    most = -1
    for i in range(len(due)):
        if due[i]:
            most = max(most, cached[i])
    due &= cached == most
    left = lot % np.uint64(due.sum())
    for i in range(len(due)):
        if due[i]:
            if left == 0:
                return i
            left -= np.uint64(1)
    return -1


class LoggedCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A source as it was weighed. `terms_ms` sum to its cost; those that are zero are left out."""

    worker: str
    dp_rank: int
    state: str
    predicted_cached_tokens: int | None
    running: float
    left_out: bool = False
    terms_ms: dict[str, float]

    @property
    def cost_ms(self) -> float:
        """Rounded after each term, as costs are added up; Python's own `sum` isn't from 3.12 on."""
        total = 0.0
        for term_ms in self.terms_ms.values():
            total += term_ms
        return total


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
        total = np.array([one.cost_ms for one in entry.candidates])
        running = np.array([float(one.running) for one in entry.candidates])
        cached = np.array([UNKNOWN if (n := one.predicted_cached_tokens) is None else n for one in entry.candidates])
        out = np.array([one.left_out for one in entry.candidates])
        if choose(total, running, cached, out, seed=seed, number=entry.number) != entry.chosen:
            others.append(entry.number)
    return others


def _lot(seed: int, number: int) -> int:
    """SplitMix64: as good as random, and the same each time."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)
