"""A second ear on an engine's event stream: raw ZMQ and msgpack, nothing of the product's own decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack
import zmq

from router.ids import SourceId
from tests.integration.asking import ask, noise
from tests.integration.background_loop import poll
from tests.integration.local_fleet import PAGE, LocalFleet

_REPLAY_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class TappedBatch:
    """One message, decoded by msgpack alone."""

    topic: bytes
    seq: int
    ts: float
    events: list[dict[str, Any]]
    dp_rank: int


@dataclass(slots=True)
class EventTap:
    """Everything heard of one source since the tap was opened, in order."""

    socket: zmq.Socket[bytes]
    replay_endpoint: str
    batches: list[TappedBatch] = field(default_factory=list)

    def read(self) -> list[TappedBatch]:
        """Take what has arrived; returns all that was ever heard."""
        while self.socket.poll(0):
            self.batches.append(_decode(self.socket.recv_multipart()))
        return self.batches

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All events of a type heard so far."""
        return [event for batch in self.read() for event in batch.events if event["type"] == kind]

    def replay(self, from_seq: int = 0) -> list[TappedBatch]:
        """What the engine's ring still holds from `from_seq` on."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.replay_endpoint)
            socket.send_multipart([b"", from_seq.to_bytes(8, "big")])
            batches: list[TappedBatch] = []
            while True:
                assert socket.poll(_REPLAY_MS), "the replay socket is silent"
                frames = socket.recv_multipart()
                if int.from_bytes(frames[-2], "big", signed=True) < 0:
                    return batches
                assert frames[0] == b""
                batches.append(_decode(frames[1:]))

    def stored(self, tokens: list[int]) -> list[dict[str, Any]]:
        """Store events whose chain starts with the first page of `tokens`."""
        return [e for e in self.events("BlockStored") if list(e["token_ids"])[:PAGE] == tokens[:PAGE]]


@contextmanager
def tapped(fleet: LocalFleet) -> Iterator[Mapping[SourceId, EventTap]]:
    """A tap on every source of the fleet, each heard to work."""
    with zmq.Context() as context:
        taps: dict[SourceId, EventTap] = {}
        try:
            for source, rank in fleet.ranks().items():
                socket = context.socket(zmq.SUB)
                socket.linger = 0
                socket.subscribe(b"")
                socket.connect(rank.endpoint)
                assert rank.replay_endpoint is not None
                taps[source] = EventTap(socket, rank.replay_endpoint)
            _wait_heard(fleet, taps)
            yield taps
        finally:
            for tap in taps.values():
                tap.socket.close()


def barrier(fleet: LocalFleet, source: SourceId, tap: EventTap) -> None:
    """Until the tap has heard all that the source published before this call."""
    tokens = _ping(fleet, source)
    poll(lambda: tap.stored(tokens), what=f"{source} heard")


def _wait_heard(fleet: LocalFleet, taps: Mapping[SourceId, EventTap]) -> None:
    """A subscription takes a moment to reach the publisher, who tells nobody: publish until it is heard."""
    for source, tap in taps.items():

        def heard(source: SourceId = source, tap: EventTap = tap) -> bool:
            _ping(fleet, source)
            return bool(tap.read())

        poll(heard, what=f"{source} heard")


def _ping(fleet: LocalFleet, source: SourceId) -> list[int]:
    """Have the source store a page that nobody has seen."""
    text = noise(random.Random(), PAGE)
    first = min(s.dp_rank for s in fleet.sources() if s.worker_id == source.worker_id)
    with fleet.engine(source.worker_id) as engine:
        ask(engine, prompt=text, routed_dp_rank=source.dp_rank - first, max_tokens=1)
    return list(text.encode())


def _decode(frames: list[bytes]) -> TappedBatch:
    topic, seq, payload = frames
    ts, events, dp_rank = msgpack.unpackb(payload)
    return TappedBatch(topic, int.from_bytes(seq, "big"), ts, events, dp_rank)
