"""Watches sources that send no heartbeat: by their replay sockets and by lost connections.

Every second each one is asked for the batch that was applied last, and what follows it. That tells of a restart on the
same address, of a lost last batch, and of an engine that is gone. A source without a replay socket is another one
after every lost connection, since nobody can tell.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

import zmq
import zmq.asyncio

from router.continuity import Continuity, judge
from router.cursor import Wish
from router.effects import Effect
from router.ids import SourceId
from router.ingest import EventIngest
from router.net.replay import fetch_replay

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
ANSWER_S: Final = 1.0
"""A publisher looks at its replay socket every 0.1 s."""


class LifeWatch:
    """Lives on the ingest's loop."""

    def __init__(
        self,
        ingest: EventIngest,
        *,
        on_restart: Callable[[SourceId], None],
        on_silence: Callable[[SourceId, bool], None],
        perform: Callable[[Iterable[Effect]], None],
    ) -> None:
        """`on_restart`: it is another engine now; `on_silence`: it has stopped or started again to answer."""
        self._ingest = ingest
        self._on_restart = on_restart
        self._on_silence = on_silence
        self._perform = perform
        #: replay endpoint of all watched sources
        self._endpoints: dict[SourceId, str | None] = {}
        #: sources whose connection was lost and that haven't answered since
        self._doubted: set[SourceId] = set()

    def add(self, source: SourceId, replay_endpoint: str | None) -> None:
        """Watch a source."""
        self._endpoints[source] = replay_endpoint

    def discard(self, source: SourceId) -> None:
        """Watch it no more."""
        self._endpoints.pop(source, None)
        self._doubted.discard(source)

    def disconnected(self, source: SourceId) -> None:
        """The connection of its event stream was lost."""
        if source not in self._endpoints:
            return
        if self._endpoints[source] is None:
            self._on_restart(source)
            return
        log.warning("%s: connection lost", source)
        if self._ingest.doubt(source):  # what it wants is asked for by `run`, with proof of identity
            self._doubted.add(source)

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Look at all sources, again and again, until cancelled."""
        while True:
            started_s = time.monotonic()
            asked = {source: endpoint for source, endpoint in self._endpoints.items() if endpoint is not None}
            await asyncio.gather(*(self._look(context, source, endpoint) for source, endpoint in asked.items()))
            await asyncio.sleep(max(0.0, LOOK_S - (time.monotonic() - started_s)))

    async def _look(self, context: zmq.asyncio.Context, source: SourceId, endpoint: str) -> None:
        if source not in self._endpoints:  # left since the round began
            return
        next_seq, last = self._ingest.cursor(source).next_seq, self._ingest.last(source)
        try:
            replay = [
                batch
                async for part in fetch_replay(context, endpoint, max(0, next_seq - 1), timeout_s=ANSWER_S)
                for batch in part
            ]
        except (TimeoutError, zmq.ZMQError) as exc:
            log.debug("%s: %s doesn't answer: %s", source, endpoint, exc)
            if source in self._endpoints:
                self._on_silence(source, True)
            return
        if source not in self._endpoints:  # left meanwhile
            return
        self._on_silence(source, False)
        if judge(next_seq, last, replay) is Continuity.OTHER:
            log.warning("%s: another engine answers at %s", source, endpoint)
            self._on_restart(source)
        elif source in self._doubted:
            self._doubted.discard(source)
            if self._ingest.cursor(source).pending is Wish.REPLAY:
                self._perform(self._ingest.replayed(source, replay, now_s=time.time()))
        elif replay:
            self._perform(self._ingest.announced(source, replay[-1].seq))
