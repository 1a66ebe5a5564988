"""Snapshots over ZMQ: a worker's mirror serves them, a router fetches them. One request, one reply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from router.effects import Effect
from router.events import Tier
from router.ids import SourceId
from router.ingest import EventIngest, SourceState
from router.reports import Snapshot, SnapshotRequest
from router.table import Hashes

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S: Final = 10.0
"""A million blocks are 8 MB: well under a second on a healthy network."""
PART_BLOCKS: Final = 16_384
"""Blocks stored at a time: a millisecond or two."""

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(SnapshotRequest).decode
_decode_snapshot = msgspec.msgpack.Decoder(Snapshot).decode


def take_snapshot(ingest: EventIngest, source: SourceId) -> Snapshot:
    """What `ingest` holds of `source`. O(table)."""
    incarnation, dp_rank = source.incarnation, source.dp_rank
    if source not in ingest or ingest.state(source) is not SourceState.EXACT:
        error = f"the worker's mirror isn't exact for {source}"
        return Snapshot(incarnation=incarnation, dp_rank=dp_rank, last_seq=-1, blocks={}, error=error)
    blocks = {tier.value: held.astype("<u8").tobytes() for tier, held in ingest.index.export(source).items()}
    last_seq = ingest.cursor(source).next_seq - 1
    return Snapshot(incarnation=incarnation, dp_rank=dp_rank, last_seq=last_seq, blocks=blocks)


class SnapshotServer:
    """Answers SnapshotRequests. `serve` runs until cancelled."""

    def __init__(self, take: Callable[[SnapshotRequest], Snapshot], host: str) -> None:
        """Binds a free port of `host`."""
        self._take = take
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.endpoint = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"

    async def serve(self) -> None:
        """Answer, one request after the other."""
        while True:
            client, *_, payload = await self._socket.recv_multipart()
            try:
                request = _decode_request(payload)
            except msgspec.MsgspecError as exc:
                log.warning("unreadable snapshot request: %s", exc)
                continue
            await self._socket.send_multipart([client, b"", _encode(self._take(request))])

    def close(self) -> None:
        """Let the port go."""
        self._context.destroy(linger=0)


async def ask_snapshot(context: zmq.asyncio.Context, endpoint: str, source: SourceId) -> Snapshot:
    """The mirror of `source` from its worker.

    Raises:
        TimeoutError: no answer, an unreadable one, or the mirror has nothing exact to give.
    """
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    try:
        socket.connect(endpoint)
        request = SnapshotRequest(incarnation=source.incarnation, dp_rank=source.dp_rank)
        await socket.send_multipart([b"", _encode(request)])
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            frames = await socket.recv_multipart()
    finally:
        socket.close()
    try:
        snapshot = _decode_snapshot(frames[-1])
    except msgspec.MsgspecError as exc:
        raise TimeoutError(f"unreadable snapshot: {exc}") from exc
    if snapshot.error:
        raise TimeoutError(snapshot.error)
    if (snapshot.incarnation, snapshot.dp_rank) != (source.incarnation, source.dp_rank):
        raise TimeoutError(f"a snapshot of {snapshot.incarnation}/r{snapshot.dp_rank} came for {source}")
    return snapshot


def snapshot_blocks(snapshot: Snapshot) -> dict[Tier, Hashes]:
    """Its hashes by tier. Raises TimeoutError, as for any unreadable snapshot."""
    try:
        return {Tier(tier): np.frombuffer(packed, "<u8").astype(np.uint64) for tier, packed in snapshot.blocks.items()}
    except ValueError as exc:
        raise TimeoutError(f"unreadable snapshot: {exc}") from exc


async def fetch_snapshot(
    context: zmq.asyncio.Context, endpoint: str, source: SourceId, ingest: EventIngest
) -> list[Effect]:
    """Fetch the mirror of `source` and give it to `ingest`, in parts, so that requests are served in between.

    Raises:
        TimeoutError: as `ask_snapshot`; or there is no room for it.
    """
    snapshot = await ask_snapshot(context, endpoint, source)
    blocks = snapshot_blocks(snapshot)
    restore = ingest.restore_begins(source)
    for tier, hashes in blocks.items():
        for start in range(0, len(hashes), PART_BLOCKS):
            if not ingest.restoring(source, restore, {tier: hashes[start : start + PART_BLOCKS]}):
                raise TimeoutError("there is no room for it, or its source is gone")
            await asyncio.sleep(0)
    return ingest.restored(source, restore, snapshot.last_seq, now_s=time.time())
