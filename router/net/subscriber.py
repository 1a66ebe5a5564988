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

from router.cursor import SeqPayload
from router.effects import Effect, RequestReplay, RequestSnapshot, Subscribe, Unsubscribe
from router.ids import SourceId
from router.ingest import EventIngest

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_S: Final = 2.0
"""SGLang's publisher looks at its replay socket at least every 0.1 s."""
RETRY_S: Final = 1.0
"""Pause before a source that couldn't be synced is tried again."""
_MESSAGES_A_TURN: Final = 256
"""Messages of one source read before others get their turn."""
_HWM: Final = 1_000_000
"""Messages the socket may queue while we are busy; the publisher's own limit is below."""

SnapshotFetcher = Callable[[zmq.asyncio.Context, SourceId], Awaitable[list[Effect]]]
"""Fetches a source's snapshot, gives it to the ingest and returns the effects; raises TimeoutError."""


class EventSubscriber:
    """Owns the sockets of all sources. Lives on one event loop."""

    def __init__(self, ingest: EventIngest, *, fetch_snapshot: SnapshotFetcher | None = None) -> None:
        self._ingest = ingest
        self._fetch_snapshot = fetch_snapshot
        self._context = zmq.asyncio.Context()
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
        self._context.destroy(linger=0)

    def received(self, source: SourceId, frames: list[bytes]) -> None:
        """A message of a subscription."""
        if len(frames) != 3 or len(frames[1]) != 8:
            log.warning("%s: message of %d frames is no event batch, ignored", source, len(frames))
            return
        batch = SeqPayload(int.from_bytes(frames[1], "big"), frames[2])
        effects = self._ingest.live(source, batch, now_s=time.time())
        if effects:
            log.warning("%s: %s after live batch %d", source, effects[0], batch.seq)
            self.perform(effects)

    def plain_context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """The context, for sockets that the loop reads by file descriptor."""
        return zmq.Context(self._context)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replay(self, source: SourceId, from_seq: int) -> None:
        stream = self._streams.get(source)
        if stream is None:
            return
        try:
            if stream.replay_endpoint is None:
                raise TimeoutError("the engine has no replay socket")
            batches = await asyncio.wait_for(self._fetch_replay(stream.replay_endpoint, from_seq), REPLAY_TIMEOUT_S)
        except TimeoutError as exc:
            log.warning("%s: no replay from %d: %s", source, from_seq, exc or f"silent for {REPLAY_TIMEOUT_S} s")
            self.perform(self._ingest.replay_failed(source))
            return
        self.perform(self._ingest.replayed(source, batches, now_s=time.time()))

    async def _fetch_replay(self, endpoint: str, from_seq: int) -> list[SeqPayload]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvhwm = _HWM
        try:
            socket.connect(endpoint)
            await socket.send_multipart([b"", from_seq.to_bytes(8, "big")])
            batches: list[SeqPayload] = []
            while True:
                frames = await socket.recv_multipart()
                seq, payload = int.from_bytes(frames[-2], "big", signed=True), frames[-1]
                if seq < 0:
                    return batches
                batches.append(SeqPayload(seq, payload))
        finally:
            socket.close()

    async def _snapshot(self, source: SourceId) -> None:
        """Until the worker's mirror can be had, start over with a replay: a source is never left behind."""
        try:
            if self._fetch_snapshot is None:
                raise TimeoutError("the worker offers no snapshot")
            self.perform(await self._fetch_snapshot(self._context, source))
        except TimeoutError as exc:
            log.warning("%s: no snapshot (%s); routed by load, next try in %.0f s", source, exc, RETRY_S)
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
        self._socket.connect(subscribe.endpoint)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.read)
        self._loop.call_soon(self.read)  # the descriptor tells changes only

    def read(self) -> None:
        """Take what is there. The descriptor is edge-triggered: stop at EAGAIN only, or come back."""
        for _ in range(_MESSAGES_A_TURN):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._owner.received(self._source, frames)
        self._loop.call_soon(self.read)

    def close(self) -> None:
        """Stop reading; queued messages are void."""
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)
