"""How fast each source computes: milliseconds to the first token by tokens to compute, learned from what it does.

Theory of operation. A curve per source, its knots at powers of two, in logarithms: `ms(n)` is the time until `n`
tokens are computed, prompts that wait ahead included. One knot costs what short prompts cost whatever their length;
attention makes long ones dearer than their length; both are in the curve. A sample moves the two knots beside it,
by a fraction of the logarithm of its error and never by more than a factor, so that one stall moves little; knots
that no sample has touched follow, so that the first samples set the scale. The curve never falls.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numba import float64, njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FIRST: Final = 4
"""log2 of the first knot's tokens: 16, below which prompts time the HTTP stack."""
NUM_KNOTS: Final = 14
"""The last knot is at 131,072 tokens; beyond it the cost grows with the length."""
_GAIN: Final = 0.25
"""Share of an error that a sample corrects: about ten samples follow a change."""
_FIRST_GAIN: Final = 0.5
_MAX_LOG: Final = math.log(2.0)
"""A sample counts at most this factor away from the curve, once a knot has been seen often."""
_FIRST_MAX_LOG: Final = math.log(64.0)
_OFTEN: Final = 4
LN_2: Final = math.log(2.0)
_KNOT_TOKENS: Final = 2.0 ** (FIRST + np.arange(NUM_KNOTS))


@njit(float64(float64[::1], float64), cache=True)
def curve_ms(log_ms, tokens):  # type: ignore[no-untyped-def]  # numba compiles it, mypy cannot see its types
    """Milliseconds until `tokens` are computed, by a row of `SpeedBook.log_ms`; 0 for none."""
    if tokens <= 0:
        return 0.0
    at = max(math.log2(tokens) - FIRST, 0.0)
    knot = min(int(at), NUM_KNOTS - 2)
    share = min(at - knot, 1.0)
    beyond = max(at - knot - 1.0, 0.0)
    return math.exp(log_ms[knot] + share * (log_ms[knot + 1] - log_ms[knot]) + beyond * LN_2)


class SpeedBook:
    """Curves by column. Positive, finite and rising, whatever the samples."""

    def __init__(self, *, tokens_per_s: float, overhead_ms: float) -> None:
        """The curve assumed of a source until it has shown its own."""
        self._prior: Floats = np.log(overhead_ms + _KNOT_TOKENS * 1000.0 / tokens_per_s)
        #: logarithm of each knot's milliseconds, a row a column
        self.log_ms: Floats = np.zeros((0, NUM_KNOTS))
        self._seen: NDArray[np.int64] = np.zeros((0, NUM_KNOTS), np.int64)

    def widen(self, more: int) -> None:
        """Room for so many more columns."""
        self.log_ms = np.vstack([self.log_ms, np.tile(self._prior, (more, 1))])
        self._seen = np.vstack([self._seen, np.zeros((more, NUM_KNOTS), np.int64)])

    def reset(self, column: int) -> None:
        """The column belongs to another source."""
        self.log_ms[column] = self._prior
        self._seen[column] = 0

    def num_samples(self, column: int) -> int:
        """Samples that the column's curve stands on, by the knot that has most."""
        return int(self._seen[column].max())

    def ms(self, column: int, tokens: float) -> float:
        """Time to compute so many tokens; 0 for none."""
        return float(curve_ms(self.log_ms[column], tokens))

    def tokens_per_s(self, column: int) -> float:
        """Speed at long prompts, for people: the slope of the curve's upper half where it has been seen."""
        seen = np.flatnonzero(self._seen[column])
        top = int(seen[-1]) if len(seen) else NUM_KNOTS - 1
        return float(_KNOT_TOKENS[top] / math.exp(self.log_ms[column, top]) * 1000.0)

    def observe(self, column: int, *, tokens: float, took_ms: float) -> None:
        """`tokens` were computed, waiting ahead included, `took_ms` after they were sent."""
        if tokens < 1 or not took_ms > 0 or not math.isfinite(took_ms):
            return
        row, seen = self.log_ms[column], self._seen[column]
        at = min(max(math.log2(tokens) - FIRST, 0.0), NUM_KNOTS - 1.0)
        knot = min(int(at), NUM_KNOTS - 2)
        share = at - knot
        nearest = knot + (share > 0.5)
        guess = row[knot] + share * (row[knot + 1] - row[knot])
        rare = seen[nearest] < _OFTEN
        limit = _FIRST_MAX_LOG if not seen.any() else 2 * _MAX_LOG if rare else _MAX_LOG
        step = (_FIRST_GAIN if rare else _GAIN) * min(max(math.log(took_ms) - guess, -limit), limit)
        if not seen.any():
            step *= 1 / _FIRST_GAIN  # the first sample sets the scale
        unseen = seen == 0
        row[unseen] += step
        if not unseen[knot]:
            row[knot] += step * (1 - share)
        if not unseen[knot + 1]:
            row[knot + 1] += step * share
        seen[nearest] += 1
        row[:nearest] = np.minimum(row[:nearest], row[nearest])
        np.maximum.accumulate(row, out=row)
