"""Requests that no worker has room for wait here, in the router, where the next free worker can still be chosen."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from router.admission import AdmissionConfig, FairQueue, Priority, Ticket
from router.core import RouterCore
from router.errors import InvalidRequest, Overloaded

PRIORITY_HEADER: Final = "x-loray-priority"
_LOOK_S: Final = 0.25
"""Room can come without a request's end: a worker is ready, an adapter is loaded, a prompt has got on."""
_PRIORITIES: Final = {priority.name.lower(): priority for priority in Priority}


class Admission:
    """Lives on the core's loop. `enter` before a request is routed, `changed` when a worker has more room."""

    def __init__(self, core: RouterCore, config: AdmissionConfig, *, record_wait: Callable[[float], None]) -> None:
        self._core = core
        self._config = config
        self._record_wait = record_wait
        self._queue = FairQueue(config.max_queued)
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        #: let go and not yet sent; one at a time, so that each is judged by what the last has booked
        self._going: Ticket | None = None
        #: refused, by code
        self.refused: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._queue)

    async def enter(self, adapter: str | None, priority: Priority, tokens: int) -> Ticket | None:
        """Return when the request may be sent: with a ticket, if it had to wait. `sent` must follow at once.

        Raises:
            Overloaded: too many wait already, or it has waited too long.
        """
        now_s = time.monotonic()
        if not self._queue and self._going is None and self._has_room(adapter):
            return None
        ticket = Ticket(adapter, priority, tokens, now_s)
        victim = self._queue.offer(ticket)
        if victim is ticket:
            raise self._refusal("queue_full", f"{len(self._queue)} requests wait already (router.admission.max_queued)")
        waiter = self._waiters[ticket] = asyncio.get_running_loop().create_future()
        if victim is not None:
            why = f"{len(self._queue)} requests wait already, most of them of {victim.adapter or 'the base model'}"
            self._refuse(victim, "queue_full", why)
        self.changed()
        try:
            await waiter
        except BaseException:
            self._leave(ticket)
            raise
        finally:
            del self._waiters[ticket]
            self._record_wait(time.monotonic() - now_s)
        return ticket

    def check_bound(self, waiting: int) -> None:
        """One more is about to wait for its adapter, where `waiting` others do. Raises Overloaded beyond the bound.

        One may always: an adapter is loaded for whoever waits for it.
        """
        if waiting and waiting + len(self._queue) >= self._config.max_queued:
            why = f"{waiting} requests wait for adapters to be loaded already (router.admission.max_queued)"
            raise self._refusal("queue_full", why)

    def sent(self, ticket: Ticket | None) -> None:
        """A request that was let go is booked, or won't be: the next may be looked at."""
        if ticket is not None and self._going is ticket:
            self._going = None
            self.changed()

    def changed(self) -> None:
        """There may be room: let the next go."""
        if self._going is not None or not self._queue:
            return
        while (ticket := self._queue.pop(self._has_room, time.monotonic())) is not None:
            if not self._waiters[ticket].done():  # else its client has left, and its task doesn't know yet
                self._going = ticket
                self._waiters[ticket].set_result(None)
                return

    async def run(self) -> None:
        """Look after those that wait, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.changed()
            for ticket in self._queue.expire(time.monotonic() - self._config.queue_timeout_s):
                why = f"no worker had room within {self._config.queue_timeout_s:g} s (router.admission.queue_timeout_s)"
                self._refuse(ticket, "queue_timeout", why)

    def _leave(self, ticket: Ticket) -> None:
        self._queue.remove(ticket)
        self.sent(ticket)

    def _has_room(self, adapter: str | None) -> bool:
        return self._core.has_room(adapter, now_s=time.monotonic(), max_queue_ms=self._config.max_engine_queue_ms)

    def _refuse(self, ticket: Ticket, code: str, why: str) -> None:
        if not self._waiters[ticket].done():
            self._waiters[ticket].set_exception(self._refusal(code, why))

    def _refusal(self, code: str, message: str) -> Overloaded:
        self.refused[code] += 1
        return Overloaded(message, retry_after_s=self._queue.retry_after_s(time.monotonic()), code=code)


def priority_of(header: str | None) -> Priority:
    """From the header's value. Raises InvalidRequest."""
    if header is None:
        return Priority.NORMAL
    try:
        return _PRIORITIES[header.strip().lower()]
    except KeyError:
        raise InvalidRequest(f"{PRIORITY_HEADER} must be one of {', '.join(_PRIORITIES)}, got {header!r}") from None
