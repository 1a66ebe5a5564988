"""Event subscriptions: carries out the core's effects on ZMQ sockets, hands what arrives back to EventIngest.

One SUB socket per source, read by the event loop itself when its file descriptor wakes. A replay runs as a task of
its own with a bounded wait, so a silent replay socket holds up nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from router.cursor import SeqPayload
from router.effects import Effect, RequestReplay, RequestSnapshot, Subscribe, Unsubscribe
from router.ids import SourceId
from router.ingest import EventIngest
from router.net.replay import fetch_replay

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""Pause before a source that couldn't be synced is tried again."""
_MESSAGES_A_TURN: Final = 256
"""Messages of one source read before others get their turn."""
_HWM: Final = 1_000_000
"""Messages the socket may queue while we are busy; the publisher's own limit is below."""


class NoSnapshotError(Exception):
    """There is nobody to ask for a snapshot of this source, now or later."""


SnapshotFetcher = Callable[[zmq.asyncio.Context, SourceId], Awaitable[list[Effect]]]
"""Fetches a source's snapshot, gives it to the ingest and returns the effects; raises TimeoutError, NoSnapshotError."""
OnDisconnect = Callable[[SourceId], None]
"""Told when a source's connection breaks; ZMQ itself reconnects."""


class EventSubscriber:
    """Owns the sockets of all sources. Lives on one event loop."""

    def __init__(
        self,
        ingest: EventIngest,
        *,
        fetch_snapshot: SnapshotFetcher | None = None,
        on_disconnect: OnDisconnect | None = None,
    ) -> None:
        """Without `fetch_snapshot`, what a replay can't bring is given up: see `EventIngest.adopt`."""
        self._ingest = ingest
        self._fetch_snapshot = fetch_snapshot
        self.on_disconnect = on_disconnect
        self.context = zmq.asyncio.Context()
        self.context.set(zmq.MAX_SOCKETS, self.context.get(zmq.SOCKET_LIMIT))  # 1,023 otherwise: two or four a source
        #: sources whose replay socket was silent when asked last
        self._unanswered: set[SourceId] = set()
        self._streams: dict[SourceId, _Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def perform(self, effects: Iterable[Effect]) -> None:
        """Carry out the core's wishes; never blocks."""
        for effect in effects:
            match effect:
                case Subscribe():
                    self._streams[effect.source] = _Stream(self, effect)
                    self._spawn(self._replay(effect.source, 0))
                case Unsubscribe():
                    self._unanswered.discard(effect.source)
                    if (stream := self._streams.pop(effect.source, None)) is not None:
                        stream.close()
                case RequestReplay():
                    self._spawn(self._replay(effect.source, effect.from_seq))
                case RequestSnapshot():
                    self._spawn(self._snapshot(effect.source))

    def drain(self, source: SourceId) -> None:
        """Apply now what of this source has arrived already."""
        if (stream := self._streams.get(source)) is not None:
            stream.read()

    async def close(self) -> None:
        """Close all sockets and end all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self.context.destroy(linger=0)

    def received(self, source: SourceId, frames: list[zmq.Frame]) -> None:
        """A message of a subscription."""
        if len(frames) != 3 or len(frames[1]) != 8:
            log.warning("%s: message of %d frames is no event batch, ignored", source, len(frames))
            return
        batch = SeqPayload(int.from_bytes(frames[1].bytes, "big"), frames[2].bytes)
        effects = self._ingest.live(source, batch, now_s=time.time())
        if effects:
            log.warning("%s: %s after live batch %d", source, effects[0], batch.seq)
            self.perform(effects)

    def plain_context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """The context, for sockets that the loop reads by file descriptor."""
        return zmq.Context(self.context)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replay(self, source: SourceId, from_seq: int) -> None:
        stream = self._streams.get(source)
        if stream is None:
            return
        self._unanswered.discard(source)
        if stream.replay_endpoint is None:
            log.warning("%s: no replay from %d: the engine has no replay socket", source, from_seq)
            self.perform(self._ingest.replay_failed(source))
            return
        try:
            async for part in fetch_replay(self.context, stream.replay_endpoint, from_seq):
                self.perform(self._ingest.replaying(source, part, now_s=time.time()))
                await asyncio.sleep(0)
        except (TimeoutError, zmq.ZMQError) as exc:
            log.warning("%s: no replay from %d: %s", source, from_seq, str(exc) or "its socket is silent")
            if source in self._streams:
                self._unanswered.add(source)
            self.perform(self._ingest.replay_failed(source))
            return
        self.perform(self._ingest.replayed(source, [], now_s=time.time()))

    async def _snapshot(self, source: SourceId) -> None:
        """Until the worker's mirror can be had, start over with a replay: a source is never left behind."""
        try:
            if self._fetch_snapshot is None:
                raise NoSnapshotError
            self.perform(await self._fetch_snapshot(self.context, source))
        except NoSnapshotError:
            if source in self._unanswered:  # its engine may have all of it, and only stand still for a moment
                await self._retry(source, "its replay socket is silent")
                return
            log.warning("%s: batches are missing that nobody has; unverified until its cache is cleared", source)
            self.perform(self._ingest.adopt(source, now_s=time.time()))
        except (TimeoutError, zmq.ZMQError) as exc:
            await self._retry(source, f"no snapshot: {exc}")

    async def _retry(self, source: SourceId, why: str) -> None:
        log.warning("%s: %s; routed by load, next try in %.0f s", source, why, RETRY_S)
        await asyncio.sleep(RETRY_S)
        self.perform(self._ingest.retry(source))


class _Stream:
    """One source's SUB socket, read when its descriptor wakes."""

    def __init__(self, owner: EventSubscriber, subscribe: Subscribe) -> None:
        self.replay_endpoint = subscribe.replay_endpoint
        self._owner = owner
        self._source = subscribe.source
        self._socket = owner.plain_context().socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.rcvhwm = _HWM
        self._socket.subscribe(b"")
        self._loop = asyncio.get_running_loop()
        #: tells of lost connections, where somebody wants to know
        self._monitor: zmq.Socket[bytes] | None = None
        if owner.on_disconnect is not None:
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
            self._loop.add_reader(self._monitor_fd, self._read_monitor)
            self._loop.call_soon(self._read_monitor)  # its descriptor, too, wakes only after a first look
        try:
            self._socket.connect(subscribe.endpoint)
        except zmq.ZMQError:
            self._close()
            raise
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.read)
        self._loop.call_soon(self.read)  # the descriptor tells changes only

    def read(self) -> None:
        """Take what is there. The descriptor is edge-triggered: stop at EAGAIN only, or come back."""
        for _ in range(_MESSAGES_A_TURN):
            if self._socket.closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames = [frame]
            while frame.more:  # a third cheaper than recv_multipart, which asks the socket after each frame
                frame = self._socket.recv(copy=False)  # messages come whole
                frames.append(frame)
            self._owner.received(self._source, frames)
        self._loop.call_soon(self.read)

    def _read_monitor(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            if self._owner.on_disconnect is not None:
                self._owner.on_disconnect(self._source)

    def close(self) -> None:
        """Stop reading; queued messages are void."""
        self._loop.remove_reader(self._fd)
        self._close()

    def _close(self) -> None:
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor_fd)
            self._monitor = None
            self._socket.disable_monitor()
        self._socket.close(linger=0)
