"""The load book: what is booked on each source, and what its requests have shown of it. Times come in from outside.

Arrays by the index's column, so that a decision over hundreds of sources is a few vector operations. A booking
holds the generation of its column: once the column belongs to another source, its release changes nothing.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.booking import Booking
from router.decode import DecodeBook
from router.ids import LoraId
from router.slots import SlotBook
from router.speed import SpeedBook
from router.terms import (
    CONTEXT,
    DISTINCT,
    FILLED,
    FILLED_HALF_LIFE_S,
    FOREIGN,
    KV,
    NUM_FIELDS,
    PROGRESS_S,
    QUEUED,
    QUEUED_MS,
    RUNNING,
    SENT,
    SENT_HALF_LIFE_S,
    SENT_S,
    any_room,
    queue_ms,
    sent_lately,
    step_ms,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_REPORTS: Final = 3
"""Reports of an engine whose middle is believed: requests come and go between its count and ours."""
_MIN_DRIFT: Final = 2.0
_DRIFT_SHARE: Final = 0.2
"""A difference up to so much of what is booked is a matter of moments."""
_GAIN: Final = 0.02
"""Weight of one request in the averages of the fleet: a hundred follow a change."""
_LOAD_GAIN: Final = 0.2
"""The same of an adapter's load: there are few."""
_MAX_FACTOR: Final = 4.0
"""A sample counts at most this factor away from its average."""


class LoadBook:
    """Booked work per column. Never negative; zero at rest."""

    def __init__(
        self,
        *,
        prefill_tokens_per_s: float,
        overhead_ms: float = 5.0,
        decode_step_ms: float = 10.0,
        slot_wait_ms: float = 200.0,
        request_ms: float = 5000.0,
        output_tokens: float = 256.0,
        adapter_load_ms: float = 1000.0,
    ) -> None:
        """What is assumed of a source until it has shown its own; `request_ms` from first token to end."""
        #: output of a request, as seen lately
        self.output_tokens = output_tokens
        #: time to load an adapter, as seen lately
        self.adapter_load_ms = adapter_load_ms
        self.speed = SpeedBook(tokens_per_s=prefill_tokens_per_s, overhead_ms=overhead_ms)
        self.decode = DecodeBook(step_ms=decode_step_ms)
        self.slots = SlotBook()
        #: wait for a LoRA slot, for each adapter too many, as seen lately
        self.slot_ms = slot_wait_ms
        #: time from first token to end, as seen lately
        self.request_ms = request_ms
        #: a row a column, see the properties
        self.state: Floats = np.zeros((0, NUM_FIELDS))
        self._generation = np.zeros(0, np.int64)
        self._numbers = count()
        #: by column, bookings by number whose answers come whole and whose prompts wait, in the order of booking
        self._whole: list[dict[int, Booking]] = []
        #: by column, how engines' own counts differed from ours lately
        self._differences: list[deque[float]] = []
        #: times that an engine's count was found to differ for a while
        self.drifts = 0

    @property
    def queued_tokens(self) -> Floats:
        """Tokens of dispatched prompts whose first token hasn't come."""
        return self.state[:, QUEUED]

    @property
    def queued_ms(self) -> Floats:
        """What computing them should take, progress apart."""
        return self.state[:, QUEUED_MS]

    @property
    def running(self) -> Floats:
        """Requests dispatched and not finished."""
        return self.state[:, RUNNING]

    @property
    def foreign(self) -> Floats:
        """Requests that engines have beyond those booked here (other routers'), or, below zero, that they lack."""
        return self.state[:, FOREIGN]

    @property
    def kv_tokens(self) -> Floats:
        """KV cache that dispatched requests take beyond what was cached."""
        return self.state[:, KV]

    @property
    def distinct(self) -> Floats:
        """Distinct adapters, the base model being one, with a request that isn't finished."""
        return self.state[:, DISTINCT]

    def widen(self, num_columns: int) -> None:
        """Make room for columns below `num_columns`."""
        more = num_columns - len(self.state)
        if more <= 0:
            return
        self.speed.widen(more)
        self.slots.widen(more)
        self.state = np.vstack([self.state, np.zeros((more, NUM_FIELDS))])
        self._generation = np.append(self._generation, np.zeros(more, np.int64))
        self._differences += [deque(maxlen=_REPORTS) for _ in range(more)]
        self._whole += [{} for _ in range(more)]

    def reset(self, column: int) -> None:
        """The column's source is gone; its open bookings become void."""
        self.speed.reset(column)
        self.slots.reset(column)
        self.state[column] = 0
        self._differences[column].clear()
        self._whole[column].clear()
        self._generation[column] += 1

    def book(
        self,
        column: int,
        *,
        tokens: int,
        lora_id: LoraId | None,
        now_s: float,
        kv_tokens: int = 0,
        context_tokens: int = 0,
        num_slots: int = 0,
        capacity_tokens: int = 0,
        whole: bool = False,
    ) -> Booking:
        """Book a request that is about to be sent.

        `tokens` is what its engine will have to compute, `kv_tokens` what it will take of the cache, output included,
        `context_tokens` what each of its decode steps reads, `num_slots` how many adapters run there at once,
        `capacity_tokens` the cache's size (0: any); `whole` says that nothing comes of its answer before all of it.
        """
        over = 0
        if num_slots and lora_id not in self.slots.running[column]:
            over = max(0, int(self.distinct[column]) + 1 - num_slots)
        booking = Booking(
            self,
            column,
            tokens=tokens,
            kv_tokens=kv_tokens,
            context_tokens=context_tokens,
            lora_id=lora_id,
            now_s=now_s,
            over=over,
            number=next(self._numbers),
            whole=whole,
        )
        if whole:
            self._whole[column][booking.number] = booking
        booking.cramped = 0 < capacity_tokens < self.state[column, KV] + kv_tokens
        row = self.state[column]
        row[PROGRESS_S] = max(row[PROGRESS_S], now_s - row[QUEUED_MS] / 1000)  # no sooner than all was computed
        row[QUEUED] += tokens
        row[QUEUED_MS] += booking.own_ms
        row[RUNNING] += 1
        age_s = max(0.0, now_s - row[SENT_S])
        row[SENT] = 1 + row[SENT] * 2.0 ** (-age_s / SENT_HALF_LIFE_S)
        row[FILLED] = kv_tokens + row[FILLED] * 2.0 ** (-age_s / FILLED_HALF_LIFE_S)
        row[SENT_S] = now_s
        row[KV] += kv_tokens
        row[CONTEXT] += context_tokens
        row[DISTINCT] = self.slots.enter(column, lora_id, num_slots)
        return booking

    def sent(self, columns: Ints, now_s: float) -> Floats:
        """Requests sent to each column lately, older ones counting for less: half after so many seconds."""
        return sent_lately(self.state, columns, now_s)  # type: ignore[no-any-return]

    def reported(self, column: int, requests: int) -> None:
        """An engine says how many requests it has, as of a moment ago."""
        row = self.state[column]
        seen = self._differences[column]
        seen.append(requests - float(row[RUNNING]))
        typical = sorted(seen)[len(seen) // 2]
        is_drift = len(seen) == _REPORTS and abs(typical) > max(_MIN_DRIFT, _DRIFT_SHARE * row[RUNNING])
        if is_drift and not row[FOREIGN]:
            self.drifts += 1
        row[FOREIGN] = typical if is_drift else 0.0

    def wait_ms(self, column: int, now_s: float) -> float:
        """What a request sent now would wait for before it is computed: prompts that wait, and a decode step."""
        row = self.state[column]
        step = self.speed.factors[column] * step_ms(self.decode.model, row[RUNNING] + row[FOREIGN], row[CONTEXT])
        return float(queue_ms(row, now_s) + step)

    def has_room(
        self, columns: Ints, *, now_s: float, max_queue_ms: float, max_running: Floats, capacity_tokens: Floats
    ) -> bool:
        """Whether a request sent to one of `columns` now would soon be computed there, not only wait.

        Limits run parallel to `columns` and are infinite where unknown.
        """
        return bool(any_room(self.state, columns, max_running, capacity_tokens, now_s, max_queue_ms))

    def is_current(self, column: int, generation: int) -> bool:
        """Whether the column still belongs to the source it belonged to then."""
        return bool(self._generation[column] == generation)

    def generation(self, column: int) -> int:
        """Changes when the column goes to another source."""
        return int(self._generation[column])

    def learn_slot_wait(self, ms: float) -> None:
        """A request has waited so long for each adapter too many."""
        self.slot_ms = _average(self.slot_ms, ms)

    def learn_duration(self, ms: float) -> None:
        """A request has ended so long after its first token."""
        self.request_ms = _average(self.request_ms, ms)

    def learn_output(self, tokens: int) -> None:
        """A request has ended with so many tokens of output."""
        self.output_tokens = _average(self.output_tokens, tokens)

    def learn_adapter_load(self, ms: float) -> None:
        """A worker has loaded an adapter, files included, in so long."""
        self.adapter_load_ms = _average(self.adapter_load_ms, ms, gain=_LOAD_GAIN)

    def check(self) -> None:
        """Invariants; for tests."""
        assert (self.queued_tokens >= 0).all(), self.queued_tokens
        assert (self.running >= 0).all(), self.running
        assert (self.kv_tokens >= 0).all(), self.kv_tokens
        assert (self.state[:, CONTEXT] >= 0).all(), self.state[:, CONTEXT]
        idle = self.running == 0
        assert (self.queued_tokens[idle] == 0).all()
        assert (self.kv_tokens[idle] == 0).all()
        assert (self.state[idle, CONTEXT] == 0).all()
        self.slots.check()
        for column, counts in enumerate(self.slots.running):
            assert sum(counts.values()) == self.running[column]
            assert len(counts) == self.distinct[column]
        for column, waiting in enumerate(self._whole):
            assert list(waiting) == sorted(waiting)
            assert len(waiting) <= self.running[column]

    # -- for bookings ------------------------------------------------------------------------------------------------

    def unqueue(self, column: int, booking: Booking, tokens: int) -> None:
        """A prompt waits no longer: it is computed, or given up."""
        self._whole[column].pop(booking.number, None)
        row = self.state[column]
        row[QUEUED] -= tokens
        row[QUEUED_MS] = max(0.0, row[QUEUED_MS] - booking.own_ms) if row[QUEUED] else 0.0

    def overtake(self, column: int, number: int) -> None:
        """A prompt is computed: so are those booked before it of which nothing can be seen until they end.

        Engines take prompts in the order in which they come. Else a whole answer would count as a prompt that waits
        for as long as it is written.
        """
        waiting = self._whole[column]
        while waiting and (first := next(iter(waiting))) < number:
            waiting[first].computed()

    def end(self, column: int, lora_id: LoraId | None, kv_tokens: int, context_tokens: int) -> None:
        """A request is over."""
        row = self.state[column]
        row[RUNNING] -= 1
        row[KV] -= kv_tokens
        row[CONTEXT] -= context_tokens
        row[DISTINCT] = self.slots.leave(column, lora_id)


def _average(now: float, sample: float, *, gain: float = _GAIN) -> float:
    return now + gain * (min(max(sample, now / _MAX_FACTOR), max(now, 1.0) * _MAX_FACTOR) - now)
