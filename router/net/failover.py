"""Attempts under watch: workers that fail or stand still are suspended, and probed until they are well again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from router.core import RouterCore
from router.decision import Decision, RouteRequest
from router.hashing import pack_tokens
from router.health import Failures, RetryBudget, stall_limit_s
from router.holders import WorkerRecord
from router.ids import SourceId, WorkerId
from router.net.engine_probe import ProbeError

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.5
_PROBE_PAUSES_S: Final = (0.5, 1.0, 2.0, 5.0)
_PROBE: Final = RouteRequest(packed_tokens=pack_tokens([3, 3]))
"""Shorter than any page: it leaves nothing in a cache."""

Probe = Callable[[SourceId, RouteRequest], Awaitable[int]]


class Attempt:
    """A request at a worker."""

    __slots__ = ("end", "expected_ms", "has_begun", "heard_s", "incarnation", "worker_id")

    def __init__(self, decision: Decision, now_s: float) -> None:
        self.worker_id = decision.source.worker_id
        self.incarnation = decision.source.incarnation
        self.expected_ms = decision.cost_ms
        #: when it was sent, or the last of its answer came
        self.heard_s = now_s
        #: its client has seen something of the answer
        self.has_begun = False
        #: ends the wait for what comes next; None while nothing is waited for
        self.end: Callable[[], None] | None = None

    def give_up(self) -> None:
        """What is waited for won't come."""
        if self.end is not None:
            end, self.end = self.end, None
            end()


class Failover:
    """Lives on the core's loop."""

    def __init__(self, core: RouterCore, *, probe: Probe) -> None:
        """`probe(source, request)` has an engine compute one token; raises ProbeError."""
        self._core = core
        self._probe = probe
        self._failures = Failures()
        #: whose failures are counted
        self._lives: dict[WorkerId, WorkerRecord] = {}
        self.budget = RetryBudget()
        #: all that haven't ended
        self._attempts: set[Attempt] = set()
        #: when something came from a worker for the last time
        self._heard_s: dict[WorkerId, float] = {}
        #: as it was when its latest probing began, while that goes on
        self._probed: dict[WorkerId, WorkerRecord] = {}
        self._probing: set[asyncio.Task[None]] = set()
        #: times that a worker was suspended
        self.suspensions = 0

    @contextmanager
    def attempt(self, decision: Decision) -> Iterator[Attempt]:
        """While a request is at a worker."""
        attempt = Attempt(decision, time.monotonic())
        self._attempts.add(attempt)
        try:
            yield attempt
        finally:
            self._attempts.discard(attempt)

    def heard(self, attempt: Attempt) -> None:
        """More of an answer has come: its worker lives."""
        attempt.heard_s = self._heard_s[attempt.worker_id] = time.monotonic()

    def answered(self, worker_id: WorkerId) -> None:
        """The worker has answered, well or with the client's fault."""
        self._heard_s[worker_id] = time.monotonic()
        self._failures.answered(worker_id)

    def failed(self, worker_id: WorkerId) -> None:
        """An attempt there came to nothing, by the worker's fault."""
        record = self._core.workers.get(worker_id)
        if record is None:
            return
        if self._lives.get(worker_id) is not record:
            self._lives[worker_id] = record
            self._failures.answered(worker_id)  # another life's failures aren't its own
        if self._failures.failed(worker_id):
            self._suspend(record, "it fails")
            self._start_probing(record, doubted=False)

    async def run(self) -> None:
        """Notice who stands still, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = time.monotonic()
            for attempt in list(self._attempts):
                self._look_at(attempt, now_s)

    async def close(self) -> None:
        """Stop probing."""
        for task in self._probing:
            task.cancel()
        await asyncio.gather(*self._probing, return_exceptions=True)

    def _look_at(self, attempt: Attempt, now_s: float) -> None:
        record = self._core.workers.get(attempt.worker_id)
        limit_s = stall_limit_s(attempt.expected_ms)
        if record is None or record.report.incarnation != attempt.incarnation:
            if now_s - attempt.heard_s > limit_s:  # its engine is gone without a word, and perhaps its machine
                attempt.give_up()
            return
        heard_s = max(attempt.heard_s, self._heard_s.get(attempt.worker_id, 0.0))
        if not attempt.has_begun and now_s - heard_s > limit_s:
            self._start_probing(record, doubted=True)

    def _start_probing(self, record: WorkerRecord, *, doubted: bool) -> None:
        """Nothing where it is probed already."""
        worker_id = record.report.worker_id
        if self._probed.get(worker_id) is record:
            return
        self._probed[worker_id] = record
        task = asyncio.ensure_future(self._keep_probing(record, doubted=doubted))
        self._probing.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._probing.discard(task)
            if self._probed.get(worker_id) is record:
                del self._probed[worker_id]

        task.add_done_callback(ended)

    def _suspend(self, record: WorkerRecord, why: str) -> None:
        if record.suspended:
            return
        worker_id = record.report.worker_id
        log.warning("worker %s is suspended: %s", worker_id, why)
        self.suspensions += 1
        self._core.suspend(worker_id, suspended=True)

    async def _keep_probing(self, record: WorkerRecord, *, doubted: bool) -> None:
        """Until it is well, or its life is over. One that is only doubted is suspended if the first probe fails."""
        worker_id = record.report.worker_id
        for i in itertools.count():
            if not (doubted and i == 0):
                await asyncio.sleep(_PROBE_PAUSES_S[min(i, len(_PROBE_PAUSES_S) - 1)])
            why = await self._probe_all(record)
            if self._is_over(record):
                return
            if not why:
                break
            self._suspend(record, f"a probe came to nothing: {why}")
            for attempt in self._attempts if self._is_anyone_well() else ():
                life = attempt.worker_id, attempt.incarnation
                if life == (worker_id, record.report.incarnation) and not attempt.has_begun:
                    attempt.give_up()
        self.answered(worker_id)
        if record.suspended:
            log.warning("worker %s is well again", worker_id)
            self._core.suspend(worker_id, suspended=False)

    async def _probe_all(self, record: WorkerRecord) -> str:
        """Each rank computes a token, behind what it has to do already. Returns why one didn't, '' if all did."""
        for source in record.sources:
            if self._is_over(record):
                return "its life is over"
            waiting_ms = float(self._core.load.queued_ms[self._core.ingest.column(source)])
            try:
                async with asyncio.timeout(stall_limit_s(waiting_ms)):
                    await self._probe(source, _PROBE)
            except (ProbeError, TimeoutError) as exc:
                return f"{type(exc).__name__}: {exc}"
        return ""

    def _is_anyone_well(self) -> bool:
        """Whether giving up is of use: where all stand still, the first to go on takes what waits at the others."""
        return any(not record.suspended for record in self._core.ready_workers())

    def _is_over(self, record: WorkerRecord) -> bool:
        """Whether the worker is gone, or lives anew."""
        return self._core.workers.get(record.report.worker_id) is not record
