"""Attempts under watch: workers that fail or stand still are suspended, and probed until they are well again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from router.core import RouterCore
from router.decision import Decision, RouteRequest
from router.hashing import pack_tokens
from router.health import Failures, RetryBudget, stall_limit_s
from router.ids import SourceId, WorkerId
from router.net.engine_probe import ProbeError

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.5
_PROBE_PAUSES_S: Final = (0.5, 1.0, 2.0, 5.0)
_PROBE: Final = RouteRequest(packed_tokens=pack_tokens([3, 3]))
"""Shorter than any page: it leaves nothing in a cache."""

Probe = Callable[[SourceId, RouteRequest], Awaitable[int]]


class Attempt:
    """A request at a worker, until its first byte."""

    __slots__ = ("expected_ms", "limit", "since_s", "worker_id")

    def __init__(self, decision: Decision, now_s: float) -> None:
        self.worker_id = decision.source.worker_id
        self.expected_ms = decision.cost_ms
        self.since_s = now_s
        #: ends the attempt; None while nothing may
        self.limit: asyncio.Timeout | None = None


class Failover:
    """Lives on the core's loop."""

    def __init__(self, core: RouterCore, *, probe: Probe) -> None:
        """`probe(source, request)` has an engine compute one token; raises ProbeError."""
        self._core = core
        self._probe = probe
        self._failures = Failures()
        self.budget = RetryBudget()
        #: attempts without a byte yet
        self._attempts: set[Attempt] = set()
        #: when something came from a worker for the last time
        self._heard_s: dict[WorkerId, float] = {}
        self._probing: dict[WorkerId, asyncio.Task[None]] = {}
        #: times that a worker was suspended
        self.suspensions = 0

    @contextmanager
    def attempt(self, decision: Decision) -> Iterator[Attempt]:
        """While a request's first byte is waited for."""
        attempt = Attempt(decision, time.monotonic())
        self._attempts.add(attempt)
        try:
            yield attempt
        finally:
            self._attempts.discard(attempt)

    def heard(self, worker_id: WorkerId) -> None:
        """Something came from the worker: it lives."""
        self._heard_s[worker_id] = time.monotonic()

    def answered(self, worker_id: WorkerId) -> None:
        """The worker has answered, well or with the client's fault."""
        self.heard(worker_id)
        self._failures.answered(worker_id)

    def failed(self, worker_id: WorkerId) -> None:
        """An attempt there came to nothing, by the worker's fault."""
        if self._failures.failed(worker_id):
            self._suspend(worker_id, "it fails", give_up=False)

    async def run(self) -> None:
        """Notice who stands still, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = time.monotonic()
            for attempt in list(self._attempts):
                since_s = max(attempt.since_s, self._heard_s.get(attempt.worker_id, 0.0))
                if now_s - since_s > stall_limit_s(attempt.expected_ms) and attempt.worker_id not in self._probing:
                    self._start_probing(attempt.worker_id, doubted=True)

    async def close(self) -> None:
        """Stop probing."""
        for task in self._probing.values():
            task.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)

    def _start_probing(self, worker_id: WorkerId, *, doubted: bool) -> None:
        task = self._probing[worker_id] = asyncio.ensure_future(self._keep_probing(worker_id, doubted=doubted))
        task.add_done_callback(lambda _: self._probing.pop(worker_id, None))

    def _suspend(self, worker_id: WorkerId, why: str, *, give_up: bool) -> None:
        """`give_up`: on attempts that wait there, too; they may be tried elsewhere."""
        record = self._core.workers.get(worker_id)
        if record is None or record.suspended:
            return
        log.warning("worker %s is suspended: %s", worker_id, why)
        self.suspensions += 1
        self._core.suspend(worker_id, suspended=True)
        for attempt in self._attempts if give_up else ():
            if attempt.worker_id == worker_id and attempt.limit is not None:
                attempt.limit.reschedule(asyncio.get_running_loop().time())
        if worker_id not in self._probing:
            self._start_probing(worker_id, doubted=False)

    async def _keep_probing(self, worker_id: WorkerId, *, doubted: bool) -> None:
        """Until it is well, or lives anew. One that is only doubted is suspended if the first probe fails."""
        record = self._core.workers.get(worker_id)
        for i in range(1 << 30):
            if record is None or self._core.workers.get(worker_id) is not record:
                return
            if not (doubted and i == 0):
                await asyncio.sleep(_PROBE_PAUSES_S[min(i, len(_PROBE_PAUSES_S) - 1)])
            try:
                await self._probe_all(worker_id)
            except (ProbeError, TimeoutError) as exc:
                self._suspend(worker_id, f"a probe came to nothing: {type(exc).__name__}: {exc}", give_up=True)
                continue
            break
        self.answered(worker_id)
        if record is not None and record.suspended:
            log.warning("worker %s is well again", worker_id)
            self._core.suspend(worker_id, suspended=False)

    async def _probe_all(self, worker_id: WorkerId) -> None:
        """Each rank computes a token, behind what it has to do already."""
        for source in self._core.workers[worker_id].sources:
            waiting_ms = float(self._core.load.queued_ms[self._core.ingest.column(source)])
            async with asyncio.timeout(stall_limit_s(waiting_ms)):
                await self._probe(source, _PROBE)
