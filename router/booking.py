"""One request's share of a source: what it takes of the load book, and what it shows of the source as it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from router.decode import MIN_TOKENS
from router.ids import LoraId
from router.terms import CONTEXT, DONE_MS, PROGRESS_S, RUNNING, queue_ms

if TYPE_CHECKING:
    from router.load import LoadBook

Floats = NDArray[np.float64]


class Booking:
    """One request's share of a source, from dispatch to its end. Whoever sends it may call each method again."""

    __slots__ = (
        "_ahead_ms", "_at_first", "_book", "_column", "_context_tokens", "_first_s", "_generation", "_kv_tokens",
        "_lora_id", "_over", "_queued", "_running", "_since_s", "_tokens", "cramped", "number", "own_ms", "whole",
    )  # fmt: skip

    def __init__(
        self,
        book: LoadBook,
        column: int,
        *,
        tokens: int,
        kv_tokens: int,
        context_tokens: int,
        lora_id: LoraId | None,
        now_s: float,
        over: int,
        number: int,
        whole: bool,
    ) -> None:
        #: counts the book's bookings
        self.number = number
        #: nothing comes of its answer before all of it, and that says nothing of its prompt's time
        self.whole = whole
        self._book = book
        self._column = column
        self._generation = book.generation(column)
        self._tokens = tokens
        self._kv_tokens = kv_tokens
        self._context_tokens = context_tokens
        self._lora_id = lora_id
        self._since_s = now_s
        #: adapters too many for the slots, this one's included
        self._over = over
        #: what its own prompt should take
        self.own_ms = book.speed.ms(column, tokens)
        #: what is left of those before it
        self._ahead_ms = float(queue_ms(book.state[column], now_s))
        self._queued = True
        self._running = True
        self._first_s: float | None = None
        #: the column's state when the first token came
        self._at_first: Floats | None = None
        #: it may have to wait for memory, which says nothing of speed
        self.cramped = False

    def __enter__(self) -> Booking:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def computed(self) -> None:
        """The prompt is computed; the book says so, once, of those that show nothing themselves."""
        self._queued = False
        self._book.unqueue(self._column, self, self._tokens)
        self._book.state[self._column, DONE_MS] += self.own_ms

    def first_token(self, *, now_s: float) -> None:
        """The engine has answered the first byte of output, or all of it: the prompt is computed."""
        if not self._queued:
            return
        book, column = self._book, self._column
        if not book.is_current(column, self._generation):
            self._queued = False
            return
        book.overtake(column, self.number)
        self.computed()
        row = book.state[column]
        if self.whole:  # computed some time ago: what waits has got on by no more than this for sure
            row[PROGRESS_S] = min(now_s, row[PROGRESS_S] + self.own_ms / 1000)
            return
        self._first_s = now_s
        row[PROGRESS_S] = now_s
        self._at_first = book.state[column].copy()
        if self.cramped:
            return
        took_ms = (now_s - self._since_s) * 1000
        if self._over:
            waited_ms = max(0.0, took_ms - self._ahead_ms - self.own_ms)
            book.learn_slot_wait(waited_ms / self._over)
        else:
            book.speed.observe(column, tokens=self._tokens, ahead_ms=self._ahead_ms, took_ms=took_ms)

    def finish(self, *, now_s: float | None = None, output_tokens: int = 0) -> None:
        """The request is over, however it ended; `now_s` where it ended well, with so many tokens."""
        if not self._running:
            return
        self._running = False
        book, column = self._book, self._column
        if not book.is_current(column, self._generation):
            return
        if self._queued:
            self._queued = False
            book.unqueue(column, self, self._tokens)
        elif now_s is not None and self._first_s is not None:
            book.learn_duration((now_s - self._first_s) * 1000)
            self._tell_decode((now_s - self._first_s) * 1000, output_tokens)
        book.end(column, self._lora_id, self._kv_tokens, self._context_tokens)

    def _tell_decode(self, took_ms: float, output_tokens: int) -> None:
        """A stream has taken so long from its first token to its last: decode steps, and others' prompts between."""
        if output_tokens < MIN_TOKENS or self._at_first is None:
            return
        book, column = self._book, self._column
        before, after = self._at_first, book.state[column]
        took_ms -= after[DONE_MS] - before[DONE_MS]
        requests = (before[RUNNING] + after[RUNNING]) / 2
        book.decode.observe(
            requests=requests,
            context_tokens=(before[CONTEXT] + after[CONTEXT]) / 2,
            took_ms=took_ms / (output_tokens - 1) / book.speed.factors[column],
        )
