"""How long a decode step takes, by requests in the batch and tokens of their context: learned from ended streams.

Theory of operation. A step reads the weights once, and each request's context: base + a * requests + b * context, the
same three numbers for all sources, times a source's own factor (SpeedBook). Sums of samples, older ones counting for
less, and the first guess, to the scale of what was seen, as if it had been seen too; least squares of both. So what the
samples don't tell apart keeps its proportions, and a few odd ones do little. Never negative.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.terms import step_ms

Floats = NDArray[np.float64]

_MEMORY: Final = 300.0
"""Samples after which one counts for 1/e."""
_GUESSES: Final = 0.1
"""Samples that the first guess counts for: it matters where nothing else tells."""
_FEW: Final = 8
"""So many first samples are believed whatever they say."""
_MAX_FACTOR: Final = 2.0
"""A sample counts at most this factor away from what was expected."""
_LEAST_MS: Final = 0.01
_MOST_MS: Final = 1e6
MIN_TOKENS: Final = 4
"""Output of a stream that tells of decode steps at all."""


class DecodeBook:
    """The three numbers."""

    def __init__(self, *, step_ms: float) -> None:
        """`step_ms`: assumed until measured; a hundred requests more, or 100,000 tokens of context, double it."""
        self._guess: Floats = np.array([step_ms, step_ms / 100, step_ms / 100_000])
        #: ms of a step, of each request in it, of each token of context
        self.model: Floats = self._guess.copy()
        self.num_samples = 0
        # of errors as shares of what was expected, and in units of the guess, which brings the three to one scale
        self._products: Floats = np.zeros((3, 3))
        self._sums: Floats = np.zeros(3)
        #: logarithm of how many times longer than guessed steps are
        self._log_scale = 0.0

    def observe(self, *, requests: float, context_tokens: float, took_ms: float) -> None:
        """A step of so many requests and tokens of context took so long, on a source of factor 1."""
        if not (took_ms > 0 and math.isfinite(took_ms) and requests > 0):
            return
        took_ms = min(max(took_ms, _LEAST_MS), _MOST_MS)
        expected_ms = max(float(step_ms(self.model, requests, context_tokens)), _LEAST_MS)
        if self.num_samples < _FEW:
            expected_ms = took_ms
        ratio = min(max(took_ms / expected_ms, 1 / _MAX_FACTOR), _MAX_FACTOR)
        self.num_samples += 1
        by_guess_ms = float(step_ms(self._guess, requests, context_tokens))
        self._log_scale += (math.log(took_ms / by_guess_ms) - self._log_scale) / min(self.num_samples, _MEMORY)
        row = np.array([1.0, requests, context_tokens]) * self._guess / expected_ms
        keep = 1.0 - 1.0 / _MEMORY
        self._products = keep * self._products + np.outer(row, row)
        self._sums = keep * self._sums + ratio * row
        self.model[:] = self._fit() * self._guess

    def _fit(self) -> Floats:
        """Least squares, in units of the guess; what would be negative is 0, the others are fitted again."""
        scale = math.exp(self._log_scale)
        products, sums = self._products * scale**2 + _GUESSES * np.eye(3), self._sums * scale + _GUESSES
        found = np.zeros(3)
        used = np.arange(3)
        while len(used):
            values = np.linalg.solve(products[np.ix_(used, used)], sums[used])
            if (values >= 0).all():
                found[used] = values
                break
            used = np.delete(used, values.argmin())
        return found * scale
