"""The load book: what is booked on each source, and how fast each has shown to be. Times come in from outside.

Arrays by the index's column, so that a decision over hundreds of sources is a few vector operations. A booking
holds the generation of its column: once the column belongs to another source, its release changes nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from router.ids import LoraId

_SAMPLE_WEIGHT: Final = 0.2
"""Weight of a new speed sample: five requests to follow a change, one outlier moves little."""
_MAX_STEP: Final = 4.0
"""A sample counts at most this factor away from the estimate."""
_MIN_SAMPLE_TOKENS: Final = 16
"""Prompts computed shorter than this time the HTTP stack, not the prefill."""


class LoadBook:
    """Booked work per column. Never negative; zero at rest."""

    def __init__(self, *, prefill_tokens_per_s: float) -> None:
        """`prefill_tokens_per_s`: speed assumed of a source until it has shown its own."""
        self._prior_tokens_per_ms = prefill_tokens_per_s / 1000
        #: tokens of dispatched prompts whose first token hasn't come
        self.queued_tokens = np.zeros(0)
        #: requests dispatched and not finished
        self.running = np.zeros(0, np.int64)
        #: measured or assumed prefill speed, tokens per ms
        self.tokens_per_ms = np.zeros(0)
        #: all and only adapters with a running request, by column
        self.adapters: list[dict[LoraId, int]] = []
        self._generation = np.zeros(0, np.int64)

    def widen(self, num_columns: int) -> None:
        """Make room for columns below `num_columns`."""
        more = num_columns - len(self.running)
        if more > 0:
            self.queued_tokens = np.append(self.queued_tokens, np.zeros(more))
            self.running = np.append(self.running, np.zeros(more, np.int64))
            self.tokens_per_ms = np.append(self.tokens_per_ms, np.full(more, self._prior_tokens_per_ms))
            self._generation = np.append(self._generation, np.zeros(more, np.int64))
            self.adapters += [{} for _ in range(more)]

    def reset(self, column: int) -> None:
        """The column's source is gone; its open bookings become void."""
        self.queued_tokens[column] = 0
        self.running[column] = 0
        self.tokens_per_ms[column] = self._prior_tokens_per_ms
        self.adapters[column] = {}
        self._generation[column] += 1

    def book(self, column: int, *, tokens: int, lora_id: LoraId | None, now_s: float) -> Booking:
        """Book a request that is about to be sent; `tokens` is what its engine will have to compute."""
        booking = Booking(self, column, int(self._generation[column]), tokens, lora_id, now_s)
        booking.alone = self.running[column] == 0
        self.queued_tokens[column] += tokens
        self.running[column] += 1
        if lora_id is not None:
            self.adapters[column][lora_id] = self.adapters[column].get(lora_id, 0) + 1
        return booking

    def observe(self, column: int, *, tokens: int, took_ms: float) -> None:
        """A prompt of which `tokens` were computed, alone on its source, took this long to its first token."""
        if tokens < _MIN_SAMPLE_TOKENS or took_ms <= 0:
            return
        now = self.tokens_per_ms[column]
        sample = min(max(tokens / took_ms, now / _MAX_STEP), now * _MAX_STEP)
        self.tokens_per_ms[column] = now + _SAMPLE_WEIGHT * (sample - now)

    def is_current(self, column: int, generation: int) -> bool:
        """Whether the column still belongs to the source it belonged to then."""
        return bool(self._generation[column] == generation)

    def check(self) -> None:
        """Invariants; for tests."""
        assert (self.queued_tokens >= 0).all(), self.queued_tokens
        assert (self.running >= 0).all(), self.running
        assert (self.queued_tokens[self.running == 0] == 0).all()
        for counts, running in zip(self.adapters, self.running, strict=True):
            assert all(count > 0 for count in counts.values())
            assert sum(counts.values()) <= running


class Booking:
    """One request's share of a source, from dispatch to its end. Every method may be called again without effect."""

    __slots__ = ("_book", "_column", "_generation", "_lora_id", "_queued", "_running", "_since_s", "_tokens", "alone")

    def __init__(
        self, book: LoadBook, column: int, generation: int, tokens: int, lora_id: LoraId | None, now_s: float
    ) -> None:
        self._book = book
        self._column = column
        self._generation = generation
        self._tokens = tokens
        self._lora_id = lora_id
        self._since_s = now_s
        self._queued = True
        self._running = True
        #: nothing else ran on the source at dispatch, so its time to first token tells the prefill speed
        self.alone = False

    def first_token(self, *, now_s: float) -> None:
        """The engine has answered the first byte of output: the prompt is computed."""
        if not self._queued:
            return
        self._queued = False
        if self._book.is_current(self._column, self._generation):
            self._book.queued_tokens[self._column] -= self._tokens
            if self.alone:
                took_ms = (now_s - self._since_s) * 1000
                self._book.observe(self._column, tokens=self._tokens, took_ms=took_ms)

    def finish(self) -> None:
        """The request is over, however it ended."""
        if not self._running:
            return
        self._running = False
        if not self._book.is_current(self._column, self._generation):
            return
        if self._queued:
            self._queued = False
            self._book.queued_tokens[self._column] -= self._tokens
        self._book.running[self._column] -= 1
        if self._lora_id is not None:
            counts = self._book.adapters[self._column]
            counts[self._lora_id] -= 1
            if not counts[self._lora_id]:
                del counts[self._lora_id]
