"""How fast sources compute: milliseconds to the first token by tokens to compute, learned from what they do.

Theory of operation. One curve for all sources, since most fleets are of one kind, and a factor for each. The curve's
knots are at powers of two, in logarithms: what a prompt of `n` uncached tokens takes. One end of it is what short
prompts cost whatever their length; attention makes long ones dearer than their length; both are in the curve. A sample
is a time to first token against what was expected, prompts ahead included. It moves the two knots beside its length,
and its source's factor, by a fraction of the logarithm of its error and by no more than a step, so that one stall moves
little; knots that no sample has touched keep their place to the others, so that the first samples set the scale. The
curve never falls. A factor counts as far as it is beyond what chance explains, by how much samples scatter and how many
a source has shown: who is thought slow is asked less, and would hardly ever show that it isn't.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.terms import FIRST, NUM_KNOTS, curve_ms

Floats = NDArray[np.float64]

_GAIN: Final = 0.1
"""Share of an error that a sample corrects in the curve."""
_FACTOR_GAIN: Final = 0.02
"""The same in its source's factor: most differences between sources are chance."""
_CHANCE: Final = 0.1
"""Logarithm of a factor that chance explains: sources of one kind must cost the same, or load gathers at some."""
_ERRORS: Final = 2.0
"""Standard errors of a factor that are called chance."""
_REMEMBERED: Final = 1 / _FACTOR_GAIN
"""Samples that a factor is made of, at most."""
_FEW: Final = 8
"""So many first samples of a knot, or a source, count for more: each as in a plain average."""
_MAX_STEP: Final = math.log(1.5)
"""A sample counts at most this factor away from what was expected, but for the first few."""
_FIRST_MAX_STEP: Final = math.log(256.0)
_KNOT_TOKENS: Final = 2.0 ** (FIRST + np.arange(NUM_KNOTS))


class SpeedBook:
    """The curve, and factors by column. Positive, finite and rising, whatever the samples."""

    def __init__(self, *, tokens_per_s: float, overhead_ms: float) -> None:
        """The curve assumed until one is learned."""
        #: logarithm of each knot's milliseconds
        self.log_ms: Floats = np.log(overhead_ms + _KNOT_TOKENS * 1000.0 / tokens_per_s)
        self._prior: Floats = self.log_ms.copy()
        #: samples by the knot nearest to them
        self._seen: NDArray[np.int64] = np.zeros(NUM_KNOTS, np.int64)
        #: knots beside a sample
        self._touched: NDArray[np.bool_] = np.zeros(NUM_KNOTS, bool)
        #: by column, how many times longer than by the curve it takes
        self.factors: Floats = np.zeros(0)
        #: logarithms of what the samples say of it
        self._log_factors: Floats = np.zeros(0)
        self._samples: NDArray[np.int64] = np.zeros(0, np.int64)
        #: mean square of errors beside curve and factor, as logarithms
        self._scatter = 0.0

    def widen(self, more: int) -> None:
        """Room for so many more columns."""
        self.factors = np.append(self.factors, np.ones(more))
        self._log_factors = np.append(self._log_factors, np.zeros(more))
        self._samples = np.append(self._samples, np.zeros(more, np.int64))

    def reset(self, column: int) -> None:
        """The column belongs to another source."""
        self.factors[column] = 1.0
        self._log_factors[column] = 0.0
        self._samples[column] = 0

    def num_samples(self, column: int) -> int:
        """Samples of this source."""
        return int(self._samples[column])

    def ms(self, column: int, tokens: float) -> float:
        """Time to compute so many tokens; 0 for none."""
        return float(self.factors[column] * curve_ms(self.log_ms, tokens))

    def tokens_per_s(self, column: int) -> float:
        """Speed at the longest prompts seen, for people."""
        seen = np.flatnonzero(self._seen)
        tokens = float(_KNOT_TOKENS[seen[-1] if len(seen) else NUM_KNOTS - 1])
        return tokens / self.ms(column, tokens) * 1000.0

    def observe(self, column: int, *, tokens: int, ahead_ms: float, took_ms: float) -> None:
        """A first token came `took_ms` after its request was sent: `tokens` were computed, `ahead_ms` waited for."""
        if tokens < 1 or not took_ms > 0 or not math.isfinite(took_ms):
            return
        own_ms = self.ms(column, tokens)
        share = own_ms / (own_ms + ahead_ms)
        error = math.log(took_ms) - math.log(own_ms + ahead_ms)
        self._bend(tokens, error, share)
        num_seen = int(self._samples.sum())
        if num_seen > 0:  # of the very first sample, all is the curve's
            step = _step(error, int(self._samples[column]), is_first=False)
            beside = step + math.log(self.factors[column]) - self._log_factors[column]
            self._scatter += (beside**2 - self._scatter) * max(_FACTOR_GAIN, 1 / num_seen)
            self._log_factors[column] += beside * max(_FACTOR_GAIN, 1 / (self._samples[column] + 2))
        self._samples[column] += 1
        self._center()

    def _bend(self, tokens: float, error: float, weight: float) -> None:
        """Move the curve at `tokens`, by as much of the error as is its own."""
        at = min(max(math.log2(tokens) - FIRST, 0.0), NUM_KNOTS - 1.0)
        knot = min(int(at), NUM_KNOTS - 2)
        share = at - knot
        nearest = knot + (share > 0.5)
        count = int(self._seen[nearest])
        is_first = not self._seen.any()
        step = _step(error, count, is_first=is_first) * (1.0 if is_first else weight * max(_GAIN, 0.5 / (count + 1)))
        row = self.log_ms
        if is_first:
            row += step
        else:
            row[knot] += step * (1 - share)
            row[knot + 1] += step * share
        self._seen[nearest] += 1
        self._touched[knot] |= share < 1
        self._touched[knot + 1] |= share > 0
        row[:nearest] = np.minimum(row[:nearest], row[nearest])
        np.maximum.accumulate(row, out=row)
        self._fill()

    def _fill(self) -> None:
        """Knots that no sample has touched: between touched ones on the line, beyond them as the first guess ran."""
        touched = np.flatnonzero(self._touched)
        first, last = touched[0], touched[-1]
        row, prior = self.log_ms, self._prior
        row[first : last + 1] = np.interp(np.arange(first, last + 1), touched, row[touched])
        row[:first] = row[first] + np.minimum(prior[:first] - prior[first], 0.0)
        row[last + 1 :] = row[last] + np.maximum(prior[last + 1 :] - prior[last], 0.0)

    def _center(self) -> None:
        """Factors of sources that have shown theirs average to one: what all have in common is the curve's."""
        known = self._samples > 0
        shift = float(self._log_factors[known].mean())
        self._log_factors[known] -= shift
        self.log_ms += shift
        error = np.sqrt(self._scatter / np.clip(self._samples, 1, _REMEMBERED))
        chance = np.maximum(_CHANCE, _ERRORS * error)
        seen = np.maximum(np.abs(self._log_factors), chance)
        self.factors[:] = np.exp(self._log_factors * (1 - (chance / seen) ** 2))  # none within chance, all far beyond


def _step(error: float, count: int, *, is_first: bool) -> float:
    limit = _FIRST_MAX_STEP if is_first else _MAX_STEP * max(1.0, _FEW / (count + 1))
    return min(max(error, -limit), limit)
