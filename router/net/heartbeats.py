"""Heartbeats of all workers, over one SUB socket: the latest WorkerReport of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq

from router.reports import WorkerReport

log = logging.getLogger(__name__)


class HeartbeatListener:
    """Hears the workers that `follow` names. Lives on one event loop."""

    def __init__(self, on_report: Callable[[WorkerReport], None]) -> None:
        self._on_report = on_report
        self._decode = msgspec.msgpack.Decoder(WorkerReport).decode
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.subscribe(b"")
        self._endpoints: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.read)

    def follow(self, endpoints: set[str]) -> None:
        """Hear these endpoints and no others."""
        for endpoint in endpoints - self._endpoints:
            self._socket.connect(endpoint)
        for endpoint in self._endpoints - endpoints:
            self._socket.disconnect(endpoint)
        self._endpoints = set(endpoints)
        self._loop.call_soon(self.read)

    def close(self) -> None:
        """Stop hearing."""
        self._loop.remove_reader(self._fd)
        self._context.destroy(linger=0)

    def read(self) -> None:
        """Take what has come; the loop does so by itself."""
        while not self._socket.closed:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                report = self._decode(payload)
            except msgspec.MsgspecError as exc:
                log.warning("a heartbeat of %d bytes is unreadable: %s", len(payload), exc)
                continue
            self._on_report(report)
