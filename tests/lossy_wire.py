"""A proxy of an engine's event stream that loses, doubles and delays what it is told to."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import Final

import zmq

from tests.ports import free_port

_WAIT_S: Final = 10.0

Fate = Callable[[int], int]
"""How often a batch of a seq goes out: 0 loses it, 2 doubles it."""


class LossyWire:
    """A proxy of an engine's event stream. `fate` decides for each batch; whoever listens is subscribed for sure."""

    def __init__(self, source: str, *, publish: Callable[[], object]) -> None:
        """`source`: the engine's endpoint; `publish` has it send a batch, for `connect`."""
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.fate: Fate = lambda _seq: 1
        #: how long a batch is held back; those behind it overtake it
        self.delay_s: Callable[[int], float] = lambda _seq: 0.0
        #: seqs that have come from the engine in its present life, and subscriptions that have come from listeners
        self.heard: set[int] = set()
        self._source = source
        self._publish = publish
        self._listeners = threading.Event()
        self._ended = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._bound.wait(_WAIT_S)

    def connect(self) -> None:
        """Until the engine's batches come here and somebody listens. Publishes empty batches to find out."""
        until_s = time.monotonic() + _WAIT_S
        while not self.heard:
            assert time.monotonic() < until_s, "nothing comes from the engine"
            self._publish()
            self._ended.wait(0.05)
        self.wait_listener()

    def wait_listener(self) -> None:
        """Until somebody listens."""
        assert self._listeners.wait(_WAIT_S), "nobody listens"

    def wait_heard(self, seq: int) -> None:
        """Until a batch has passed here, or was lost here."""
        until_s = time.monotonic() + _WAIT_S
        while seq not in self.heard:
            assert time.monotonic() < until_s, f"batch {seq} doesn't come"
            self._ended.wait(0.005)

    def close(self) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join(_WAIT_S)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as source, context.socket(zmq.XPUB) as sink:
            for one in (source, sink):
                one.linger = 0
            source.subscribe(b"")
            source.connect(self._source)
            sink.bind(self.endpoint)
            self._bound.set()
            held: list[tuple[float, tuple[int, int], list[bytes]]] = []
            while not self._ended.is_set():
                if sink.poll(0):
                    sink.recv()
                    self._listeners.set()
                while held and held[0][0] <= time.monotonic():
                    sink.send_multipart(heapq.heappop(held)[2])
                if not source.poll(2):
                    continue
                frames = source.recv_multipart()
                seq = int.from_bytes(frames[1], "big")
                for copy in range(self.fate(seq)):
                    heapq.heappush(held, (time.monotonic() + self.delay_s(seq), (seq, copy), frames))
                self.heard.add(seq)
