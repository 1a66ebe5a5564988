"""The queue of requests that no worker has room for: bounded, by priority, fair between adapters. Pure.

Theory of operation. Within a priority, adapters (the base model being one) take turns by the tokens they ask for:
start-time fair queueing, each adapter's next request starting where its last one that was served ended in virtual time,
or now if it has been away, or had no room while others were served. So an adapter that floods waits behind itself. Each
priority has a virtual time of its own. At the bound, the newcomer goes unless another adapter of no higher priority has
more waiting: then that one's latest goes. Whoever goes is told why and when to come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Final

import msgspec

_RATE_WINDOW: Final = 64
_MIN_RETRY_S: Final = 1
_MAX_RETRY_S: Final = 60


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `router.admission` of the configuration."""

    max_queued: Annotated[int, msgspec.Meta(ge=0)] = 4096
    """Requests that may wait in the router, for room or an adapter; the next are answered 429."""
    queue_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Longest that a request waits for a worker with room."""
    max_engine_queue_ms: Annotated[float, msgspec.Meta(gt=0)] = 2000.0
    """Prefill that all engines that could serve a request may have waiting before it stays in the router."""


class Priority(IntEnum):
    """Served strictly in this order."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(slots=True, eq=False)
class Ticket:
    """A waiting request."""

    adapter: str | None
    priority: Priority
    tokens: int
    since_s: float


_Key = tuple[Priority, str | None]


@dataclass(slots=True)
class _Flow:
    """One adapter's waiting requests of one priority."""

    #: virtual time at which its first request starts
    start: float
    tickets: deque[Ticket] = field(default_factory=deque)


class FairQueue:
    """See the module. `offer`, then `pop`, `remove` or `expire` gives the ticket back."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        #: all and only lines with somebody in
        self._flows: dict[_Key, _Flow] = {}
        self._count = 0
        #: where the latest request served started
        self._virtual = dict.fromkeys(Priority, 0.0)
        #: where lines that are empty would go on; all and only those later than their priority's virtual time
        self._ends: dict[_Key, float] = {}
        self._popped: deque[float] = deque(maxlen=_RATE_WINDOW)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket]:
        for flow in self._flows.values():
            yield from flow.tickets

    def offer(self, ticket: Ticket) -> Ticket | None:
        """Put a request in line. Returns the one that has to go for it: none, another's, or itself."""
        victim = None
        if self._count >= self._max_queued:
            victim = self._victim(ticket)
            if victim is ticket:
                return ticket
            self.remove(victim)
        key = (ticket.priority, ticket.adapter)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(self._ends.pop(key, self._virtual[ticket.priority]))
        flow.tickets.append(ticket)
        self._count += 1
        return victim

    def pop(self, has_room: Callable[[str | None], bool], now_s: float) -> Ticket | None:
        """The next request whose adapter has room somewhere; None if there is none."""
        best: tuple[Priority, float, str | None] | None = None
        passed: list[tuple[Priority, _Flow]] = []
        for (priority, adapter), flow in self._flows.items():
            if best is not None and (priority, flow.start) >= best[:2]:
                continue
            if has_room(adapter):
                best = priority, flow.start, adapter
            else:
                passed.append((priority, flow))
        if best is None:
            return None
        priority, start, adapter = best
        ticket = self._serve(priority, adapter)
        for of, flow in passed:  # what they couldn't have, they have no claim to later
            if of == priority:
                flow.start = max(flow.start, start)
        self._popped.append(now_s)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Its client has left, or it is served. Nothing if it isn't in line."""
        key = (ticket.priority, ticket.adapter)
        flow = self._flows.get(key)
        if flow is None or ticket not in flow.tickets:
            return
        flow.tickets.remove(ticket)
        self._count -= 1
        if not flow.tickets:
            del self._flows[key]
            if flow.start > self._virtual[ticket.priority]:
                self._ends[key] = flow.start
        if not self._count:
            self._virtual = dict.fromkeys(Priority, 0.0)
            self._ends = {}

    def expire(self, before_s: float) -> list[Ticket]:
        """Take out all that have waited since before a time."""
        late = [ticket for ticket in self if ticket.since_s < before_s]
        for ticket in late:
            self.remove(ticket)
        return late

    def retry_after_s(self, now_s: float) -> int:
        """When a request that is refused now would find the queue half as long, at the present pace."""
        if len(self._popped) < 2 or now_s <= self._popped[0]:
            return _MIN_RETRY_S
        per_s = len(self._popped) / (now_s - self._popped[0])
        return int(min(max(self._count / 2 / per_s, _MIN_RETRY_S), _MAX_RETRY_S))

    def _serve(self, priority: Priority, adapter: str | None) -> Ticket:
        """Take out the first of a line, and move its priority's time on."""
        flow = self._flows[priority, adapter]
        ticket = flow.tickets[0]
        now = self._virtual[priority] = max(self._virtual[priority], flow.start)
        flow.start += max(1, ticket.tokens)
        self._ends = {key: end for key, end in self._ends.items() if key[0] != priority or end > now}
        self.remove(ticket)
        return ticket

    def _victim(self, newcomer: Ticket) -> Ticket:
        """The latest of the longest line among those of the lowest priority, unless the newcomer is no better off."""
        if not self._flows:
            return newcomer
        key, flow = max(self._flows.items(), key=lambda item: (item[0][0], len(item[1].tickets)))
        own = self._flows.get((newcomer.priority, newcomer.adapter))
        own_length = len(own.tickets) if own is not None else 0
        if key[0] < newcomer.priority or (key[0] == newcomer.priority and len(flow.tickets) <= own_length + 1):
            return newcomer
        return flow.tickets[-1]
