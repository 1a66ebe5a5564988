"""SGLang's replay socket, as a client: all batches that the engine still has from a sequence number on.

A DEALER asks `[b"", seq]`, a ROUTER answers `[b"", topic, seq, payload]` (older releases: no topic) and ends with
seq -1. The ROUTER drops what doesn't fit its queue, the end included, so silence after some batches ends them too.
Source: sglang.srt.disaggregation.kv_events.ZmqEventPublisher.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import zmq
import zmq.asyncio

from router.cursor import SeqPayload

REPLAY_TIMEOUT_S: Final = 2.0
"""Longest silence; SGLang's publisher looks at its replay socket at least every 0.1 s."""
CHUNK: Final = 128
"""Batches handed over at a time, so that others get their turn in between."""
_HWM: Final = 1_000_000


async def fetch_replay(
    context: zmq.asyncio.Context, endpoint: str, from_seq: int, *, timeout_s: float = REPLAY_TIMEOUT_S
) -> AsyncIterator[list[SeqPayload]]:
    """Batches from `from_seq` on, as far as the engine still has them, in parts.

    Raises:
        TimeoutError: nothing came within `timeout_s`.
    """
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvhwm = _HWM
    try:
        socket.connect(endpoint)
        await socket.send_multipart([b"", from_seq.to_bytes(8, "big")])
        any_came = False
        part: list[SeqPayload] = []
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    frames = await socket.recv_multipart()
            except TimeoutError:
                if not any_came:
                    raise
                break
            if len(frames) < 2 or len(frames[-2]) != 8:
                continue
            seq = int.from_bytes(frames[-2], "big", signed=True)
            if seq < 0:
                break
            any_came = True
            part.append(SeqPayload(seq, frames[-1]))
            if len(part) >= CHUNK:
                yield part
                part = []
        yield part
    finally:
        socket.close()
