"""`bench mirror`: what a worker's mirror costs, and how fast a router is made whole from it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from deployment.bench.index import payloads_of
from router.effects import Subscribe
from router.events import Tier
from router.ids import DpRank, Incarnation, SourceId, WorkerId
from router.ingest import EventIngest
from router.net.snapshots import SnapshotServer, fetch_snapshot, take_snapshot
from router.net.subscriber import EventSubscriber
from router.table import as_keys

RATE_BLOCKS_PER_S: Final = 50_000
"""What a busy engine stores and removes; the mirror's share of a core is told at this rate."""
BLOCKS_PER_EVENT: Final = 16
"""A prompt's pages come coalesced."""
_SOURCE: Final = SourceId(WorkerId("w0"), Incarnation("bench"), DpRank(0))
_EMPTY: Final = msgspec.msgpack.encode([0.0, [], 0])
_PATIENCE_S: Final = 60.0
_LOOK_S: Final = 0.001


def run(*, quick: bool) -> dict[str, Any]:
    """All figures. `quick` is for a smoke test, its figures mean nothing."""
    num_blocks = 50_000 if quick else 1_000_000
    rng = random.Random(0)
    hashes = [rng.getrandbits(64) - (1 << 63) for _ in range(num_blocks)]
    rounds = 1 if quick else 5
    us_per_block = min(_mirror_us(hashes[: num_blocks // 5], rng) for _ in range(rounds))  # the least disturbed one
    return {
        "mirror": {
            "us_per_block": us_per_block,
            "blocks_per_event": BLOCKS_PER_EVENT,
            "core_share_at_50k_blocks_per_s": round(us_per_block * RATE_BLOCKS_PER_S / 1e6, 4),
        },
        "snapshot": {"blocks": num_blocks, **asyncio.run(_snapshot(hashes))},
    }


def _mirror_us(hashes: list[int], rng: random.Random) -> float:
    """CPU time of a mirror's loop for one block, from ZMQ message to table."""
    payloads = payloads_of(hashes, BLOCKS_PER_EVENT, rng)
    return round(asyncio.run(_mirror_s(payloads)) / len(hashes) * 1e6, 3)


async def _mirror_s(payloads: Sequence[bytes]) -> float:
    """CPU seconds of a mirror's loop for these batches, which wait in its socket."""
    ingest = EventIngest()
    ingest.add(_SOURCE)
    cursor = ingest.cursor(_SOURCE)
    subscriber = EventSubscriber(ingest)
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.sndhwm = 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    subscriber.perform([Subscribe(_SOURCE, f"tcp://127.0.0.1:{port}", None)])
    seqs = count()

    def send(payload: bytes) -> int:
        seq = next(seqs)
        publisher.send_multipart([b"", seq.to_bytes(8, "big"), payload])
        return seq

    await _until(lambda: cursor.pending is None)  # it has learned that there is no replay socket
    await _until(lambda: send(_EMPTY) >= 0 and cursor.next_seq > 0)
    last = [send(payload) for payload in payloads][-1]
    started = time.thread_time()
    await _until(lambda: cursor.next_seq > last)
    spent = time.thread_time() - started
    await subscriber.close()
    context.destroy(linger=0)
    return spent


async def _until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > until_s:
            raise RuntimeError(f"the measurement doesn't get on within {_PATIENCE_S:.0f} s")
        await asyncio.sleep(_LOOK_S)


async def _snapshot(hashes: list[int]) -> dict[str, float]:
    """Seconds until a router has a mirror's blocks, and the longest time that either loop was held up meanwhile."""
    mirror, router = EventIngest(), EventIngest()
    for ingest in (mirror, router):
        ingest.add(_SOURCE)
    mirror.snapshot(_SOURCE, 0, {Tier.GPU: as_keys(hashes)}, now_s=0.0)
    server = SnapshotServer(lambda _request: take_snapshot(mirror, _SOURCE), "127.0.0.1")
    serving = asyncio.ensure_future(server.serve())
    context = zmq.asyncio.Context()
    router.replay_failed(_SOURCE)

    async def fetch() -> None:
        await fetch_snapshot(context, server.endpoint, _SOURCE, router)

    taken_s, stall_s = await _with_longest_stall(fetch)
    assert router.index.num_blocks(_SOURCE) == len(set(hashes))
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    server.close()
    context.destroy(linger=0)
    return {"seconds": round(taken_s, 3), "longest_stall_ms": round(stall_s * 1000, 1)}


async def _with_longest_stall(work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Duration of `work`, and the longest pause between two turns of the loop during it."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watching = asyncio.ensure_future(watch())
    started = time.perf_counter()
    await work()
    taken = time.perf_counter() - started
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return taken, longest
