"""Keeps a RouterCore true to its workers: heartbeats, event streams, replays, snapshots, and silence.

Carries out what the core asks for, on sockets. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import zmq.asyncio

from router.core import RouterCore
from router.effects import Effect
from router.ids import SourceId, WorkerId
from router.net.heartbeats import HeartbeatListener
from router.net.snapshots import fetch_snapshot
from router.net.subscriber import EventSubscriber, NoSnapshotError
from router.reports import WorkerReport, WorkerState

log = logging.getLogger(__name__)

SILENT_S: Final = 2.2
"""Two heartbeats missed: nothing is predicted for the worker, and it is asked last."""
FORGET_S: Final = 10.0
"""A worker unheard for so long is forgotten until it is heard again."""
_WATCH_S: Final = 0.25
_READMIT_S: Final = 30.0
"""Pace at which sources that were set aside for want of memory are looked at again."""


class Follower:
    """Lives on the core's event loop."""

    def __init__(self, core: RouterCore, *, on_report: Callable[[WorkerReport], None] | None = None) -> None:
        """`on_report` is told of every heartbeat, after the core."""
        self._core = core
        self._on_report = on_report
        #: when each followed worker was last heard, monotonic seconds; None before the first time
        self._heard_s: dict[WorkerId, float | None] = {}
        self._subscriber = EventSubscriber(core.ingest, fetch_snapshot=self._fetch_snapshot)
        self._heartbeats = HeartbeatListener(self._heard)

    @property
    def context(self) -> zmq.asyncio.Context:
        """For whoever asks workers on sockets of its own."""
        return self._subscriber.context

    def follow(self, endpoints: Mapping[WorkerId, str]) -> None:
        """These workers and no others: id -> heartbeat endpoint."""
        for worker_id in self._heard_s.keys() - endpoints.keys():
            del self._heard_s[worker_id]
            self._subscriber.perform(self._core.forget(worker_id))
        for worker_id in endpoints:
            self._heard_s.setdefault(worker_id, None)
        self._heartbeats.follow(set(endpoints.values()))

    def drain(self, source: SourceId) -> None:
        """Apply now what of this source has arrived already."""
        self._subscriber.drain(source)

    def resync(self, source: SourceId) -> None:
        """What is known of the source is wrong: take it anew from its worker's mirror."""
        self._subscriber.perform(self._core.ingest.replay_failed(source))

    async def watch(self) -> None:
        """Notice silence. Runs until cancelled."""
        readmitted_s = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            self._heartbeats.read()  # a loop that was busy has heartbeats waiting
            now_s = time.monotonic()
            for worker_id, heard_s in self._heard_s.items():
                if heard_s is not None and now_s - heard_s > SILENT_S:
                    self._miss(worker_id, now_s - heard_s)
            if now_s - readmitted_s > _READMIT_S:
                readmitted_s = now_s
                self._subscriber.perform(self._core.ingest.readmit())

    async def close(self) -> None:
        """Let all sockets go."""
        await self._subscriber.close()
        self._heartbeats.close()

    def _miss(self, worker_id: WorkerId, silent_s: float) -> None:
        record = self._core.workers.get(worker_id)
        if record is None:
            return
        if silent_s > FORGET_S:
            log.warning("worker %s is silent for %.1f s: forgotten until it speaks", worker_id, silent_s)
            self._subscriber.perform(self._core.forget(worker_id))
        elif not record.silent:
            log.warning("worker %s is silent for %.1f s: asked last until it speaks", worker_id, silent_s)
            self._core.silence(worker_id)

    def _heard(self, report: WorkerReport) -> None:
        if report.worker_id not in self._heard_s:
            return
        self._heard_s[report.worker_id] = time.monotonic()
        if report.state is WorkerState.STOPPED:
            self._subscriber.perform(self._core.forget(report.worker_id))
            return
        self._subscriber.perform(self._core.report(report))
        if self._on_report is not None:
            self._on_report(report)

    async def _fetch_snapshot(self, context: zmq.asyncio.Context, source: SourceId) -> list[Effect]:
        record = self._core.workers.get(source.worker_id)
        if record is None:
            raise TimeoutError("its worker is gone")
        if not record.report.snapshot_endpoint:
            raise NoSnapshotError
        return await fetch_snapshot(context, record.report.snapshot_endpoint, source, self._core.ingest)
