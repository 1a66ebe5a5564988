"""The load book: what is booked on each source, and what its requests have shown of it. Times come in from outside.

Arrays by the index's column, so that a decision over hundreds of sources is a few vector operations. A booking
holds the generation of its column: once the column belongs to another source, its release changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.ids import LoraId
from router.speed import SpeedBook

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

QUEUED, RUNNING, KV, DISTINCT, SLOT_MS, REQUEST_MS = range(6)
"""Fields of `LoadBook.state`."""
RUNS: Final = 1
"""`LoadBook.flags`: requests of the adapter run there."""
RECENT: Final = 2
"""It is among the last that as many slots hold."""

_GAIN: Final = 0.1
"""Weight of one request in the averages: about twenty follow a change."""
_MAX_FACTOR: Final = 4.0
"""A sample counts at most this factor away from its average."""


class LoadBook:
    """Booked work per column. Never negative; zero at rest."""

    def __init__(
        self,
        *,
        prefill_tokens_per_s: float,
        overhead_ms: float = 5.0,
        slot_wait_ms: float = 200.0,
        request_ms: float = 5000.0,
        output_tokens: float = 256.0,
    ) -> None:
        """What is assumed of a source until it has shown its own; `request_ms` from first token to end."""
        #: output of a request, as seen lately
        self.output_tokens = output_tokens
        self.speed = SpeedBook(tokens_per_s=prefill_tokens_per_s, overhead_ms=overhead_ms)
        self._prior: Floats = np.zeros(REQUEST_MS + 1)
        self._prior[[SLOT_MS, REQUEST_MS]] = slot_wait_ms, request_ms
        #: a row a column, see the properties
        self.state: Floats = np.zeros((0, len(self._prior)))
        #: by column, what adapters have requests there, and how many; None is the base model
        self.adapters: list[dict[LoraId | None, int]] = []
        #: by column, adapters in the order of their last use, the latest last
        self._recent: list[OrderedDict[LoraId, None]] = []
        self._recent_at: dict[LoraId, set[int]] = {}
        self._running_at: dict[LoraId | None, set[int]] = {}
        self._generation = np.zeros(0, np.int64)

    @property
    def queued_tokens(self) -> Floats:
        """Tokens of dispatched prompts whose first token hasn't come."""
        return self.state[:, QUEUED]

    @property
    def running(self) -> Floats:
        """Requests dispatched and not finished."""
        return self.state[:, RUNNING]

    @property
    def kv_tokens(self) -> Floats:
        """KV cache that dispatched requests take beyond what was cached."""
        return self.state[:, KV]

    @property
    def distinct(self) -> Floats:
        """Distinct adapters, the base model being one, with a request that isn't finished."""
        return self.state[:, DISTINCT]

    @property
    def slot_ms(self) -> Floats:
        """Wait for a LoRA slot, for each adapter too many, as seen lately."""
        return self.state[:, SLOT_MS]

    @property
    def request_ms(self) -> Floats:
        """Time from first token to end, as seen lately."""
        return self.state[:, REQUEST_MS]

    def widen(self, num_columns: int) -> None:
        """Make room for columns below `num_columns`."""
        more = num_columns - len(self.state)
        if more <= 0:
            return
        self.speed.widen(more)
        self.state = np.vstack([self.state, np.tile(self._prior, (more, 1))])
        self._generation = np.append(self._generation, np.zeros(more, np.int64))
        self.adapters += [{} for _ in range(more)]
        self._recent += [OrderedDict() for _ in range(more)]

    def reset(self, column: int) -> None:
        """The column's source is gone; its open bookings become void."""
        self.speed.reset(column)
        self.state[column] = self._prior
        for adapter in self.adapters[column]:
            self._leave(column, adapter)
        self.adapters[column] = {}
        for lora_id in list(self._recent[column]):
            self._forget_recent(column, lora_id)
        self._generation[column] += 1

    def book(
        self,
        column: int,
        *,
        tokens: int,
        lora_id: LoraId | None,
        now_s: float,
        kv_tokens: int = 0,
        num_slots: int = 0,
    ) -> Booking:
        """Book a request that is about to be sent.

        `tokens` is what its engine will have to compute, `kv_tokens` what it will take of the cache, output included,
        `num_slots` how many adapters run there at once (0: any).
        """
        over = 0
        if num_slots and lora_id not in self.adapters[column]:
            over = max(0, int(self.distinct[column]) + 1 - num_slots)
        booking = Booking(self, column, tokens=tokens, kv_tokens=kv_tokens, lora_id=lora_id, now_s=now_s, over=over)
        counts = self.adapters[column]
        counts[lora_id] = counts.get(lora_id, 0) + 1
        self._running_at.setdefault(lora_id, set()).add(column)
        row = self.state[column]
        row[QUEUED] += tokens
        row[RUNNING] += 1
        row[KV] += kv_tokens
        row[DISTINCT] = len(counts)
        if lora_id is not None and num_slots:
            self._use(column, lora_id, num_slots)
        return booking

    def flags(self, lora_id: LoraId | None, columns: Ints) -> NDArray[np.uint8]:
        """RUNS and RECENT of the adapter at each column."""
        flags = np.zeros(len(self.state), np.uint8)
        if running := self._running_at.get(lora_id):
            flags[list(running)] = RUNS
        if lora_id is not None and (recent := self._recent_at.get(lora_id)):
            flags[list(recent)] |= RECENT
        return flags[columns]

    def is_current(self, column: int, generation: int) -> bool:
        """Whether the column still belongs to the source it belonged to then."""
        return bool(self._generation[column] == generation)

    def generation(self, column: int) -> int:
        """Changes when the column goes to another source."""
        return int(self._generation[column])

    def learn(self, column: int, field: int, sample: float) -> None:
        """Take a sample into the averages SLOT_MS or REQUEST_MS."""
        now = float(self.state[column, field])
        self.state[column, field] += _GAIN * (min(max(sample, now / _MAX_FACTOR), now * _MAX_FACTOR) - now)

    def learn_output(self, tokens: int) -> None:
        """A request has ended with so many tokens of output."""
        self.output_tokens += _GAIN * (min(tokens, self.output_tokens * _MAX_FACTOR) - self.output_tokens)

    def check(self) -> None:
        """Invariants; for tests."""
        assert (self.queued_tokens >= 0).all(), self.queued_tokens
        assert (self.running >= 0).all(), self.running
        assert (self.kv_tokens >= 0).all(), self.kv_tokens
        idle = self.running == 0
        assert (self.queued_tokens[idle] == 0).all()
        assert (self.kv_tokens[idle] == 0).all()
        for column, counts in enumerate(self.adapters):
            assert all(count > 0 for count in counts.values())
            assert sum(counts.values()) == self.running[column]
            assert len(counts) == self.distinct[column]
        assert {(c, a) for c, r in enumerate(self._recent) for a in r} == {
            (c, a) for a, at in self._recent_at.items() for c in at
        }
        assert {(c, a) for c, counts in enumerate(self.adapters) for a in counts} == {
            (c, a) for a, at in self._running_at.items() for c in at
        }

    def _end(self, column: int, lora_id: LoraId | None, kv_tokens: int) -> None:
        counts = self.adapters[column]
        counts[lora_id] -= 1
        if not counts[lora_id]:
            del counts[lora_id]
            self._leave(column, lora_id)
        row = self.state[column]
        row[RUNNING] -= 1
        row[KV] -= kv_tokens
        row[DISTINCT] = len(counts)

    def _leave(self, column: int, lora_id: LoraId | None) -> None:
        self._running_at[lora_id].discard(column)
        if not self._running_at[lora_id]:
            del self._running_at[lora_id]

    def _use(self, column: int, lora_id: LoraId, num_slots: int) -> None:
        recent = self._recent[column]
        recent[lora_id] = None
        recent.move_to_end(lora_id)
        self._recent_at.setdefault(lora_id, set()).add(column)
        while len(recent) > num_slots:
            self._forget_recent(column, next(iter(recent)))

    def _forget_recent(self, column: int, lora_id: LoraId) -> None:
        del self._recent[column][lora_id]
        self._recent_at[lora_id].discard(column)
        if not self._recent_at[lora_id]:
            del self._recent_at[lora_id]


class Booking:
    """One request's share of a source, from dispatch to its end. Every method may be called again without effect."""

    __slots__ = (
        "_ahead", "_book", "_column", "_first_s", "_generation", "_kv_tokens", "_lora_id", "_over", "_queued",
        "_running", "_since_s", "_tokens", "timed",
    )  # fmt: skip

    def __init__(
        self,
        book: LoadBook,
        column: int,
        *,
        tokens: int,
        kv_tokens: int,
        lora_id: LoraId | None,
        now_s: float,
        over: int,
    ) -> None:
        self._book = book
        self._column = column
        self._generation = book.generation(column)
        self._tokens = tokens
        self._kv_tokens = kv_tokens
        self._lora_id = lora_id
        self._since_s = now_s
        #: adapters too many for the slots, this one's included
        self._over = over
        #: tokens that wait ahead
        self._ahead = float(book.queued_tokens[column])
        self._queued = True
        self._running = True
        self._first_s: float | None = None
        #: the first byte shows when the first token was there; not so for an answer that comes whole
        self.timed = True

    def first_token(self, *, now_s: float) -> None:
        """The engine has answered the first byte of output: the prompt is computed."""
        if not self._queued:
            return
        self._queued = False
        self._first_s = now_s
        book, column = self._book, self._column
        if not book.is_current(column, self._generation):
            return
        book.state[column, QUEUED] -= self._tokens
        if not self.timed:
            return
        took_ms = (now_s - self._since_s) * 1000
        work = self._ahead + self._tokens
        if self._over:
            computing_ms = book.speed.ms(column, work)
            book.learn(column, SLOT_MS, max(0.0, took_ms - computing_ms) / self._over)
        else:
            book.speed.observe(column, tokens=work, took_ms=took_ms)

    def finish(self, *, now_s: float | None = None) -> None:
        """The request is over, however it ended; `now_s` where it ended well."""
        if not self._running:
            return
        self._running = False
        book, column = self._book, self._column
        if not book.is_current(column, self._generation):
            return
        if self._queued:
            self._queued = False
            book.state[column, QUEUED] -= self._tokens
        elif now_s is not None and self.timed and self._first_s is not None:
            book.learn(column, REQUEST_MS, (now_s - self._first_s) * 1000)
        book._end(column, self._lora_id, self._kv_tokens)
