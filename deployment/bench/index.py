"""`bench index`: ingest of event batches, match of prompts, memory, each beside a dict of sets."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from deployment.bench.timing import percentiles_us
from router.cursor import SeqPayload
from router.events import Tier
from router.ids import DpRank, Incarnation, SourceId, WorkerId
from router.ingest import EventIngest
from router.table import Hashes, as_keys

PAGE_SIZE: Final = 16
NUM_WORKERS: Final = 8
_SMALL_EVENTS: Final = 32
"""Events in a message where each carries one block."""


def run(*, quick: bool) -> dict[str, Any]:
    """All figures. `quick` is for a smoke test, its figures mean nothing."""
    num_blocks = 50_000 if quick else 1_000_000
    rng = random.Random(0)
    hashes = [rng.getrandbits(64) - (1 << 63) for _ in range(num_blocks)]
    ingest, plain = {}, {}
    for per_event in (1, 16, 64):
        payloads = payloads_of(hashes[: num_blocks // 5], per_event, rng)
        rounds = 1 if quick else 3
        ingest[str(per_event)] = {"us_per_block": min(_ingest_us(payloads, num_blocks // 5) for _ in range(rounds))}
        plain[str(per_event)] = {"us_per_block": min(_plain_ingest_us(payloads) for _ in range(rounds))}
    filled, bytes_per_block = _filled(hashes)
    plain_index, plain_bytes = _plain_filled(hashes)
    match, plain_match = {}, {}
    each = num_blocks // NUM_WORKERS
    for length in (64, 256, 1024):
        rounds = 50 if quick else 1000
        starts = [rng.randrange(NUM_WORKERS) * each + rng.randrange(each - length) for _ in range(rounds + 20)]
        prompts = [hashes[start : start + length] for start in starts]
        match[str(length)] = percentiles_us(_matching(filled, prompts), rounds=rounds)
        plain_match[str(length)] = percentiles_us(_plain_matching(plain_index, prompts), rounds=rounds)
    return {
        "blocks": num_blocks,
        "workers": NUM_WORKERS,
        "ingest": ingest,
        "match": match,
        "bytes_per_block": round(bytes_per_block, 1),
        "plain": {"ingest": plain, "match": plain_match, "bytes_per_block": round(plain_bytes, 1)},
    }


def _sources() -> list[SourceId]:
    return [SourceId(WorkerId(f"w{i}"), Incarnation("bench"), DpRank(i)) for i in range(NUM_WORKERS)]


def payloads_of(hashes: Sequence[int], per_event: int, rng: random.Random) -> list[bytes]:
    """Messages as SGLang sends them, token ids included."""
    events = []
    for start in range(0, len(hashes) - per_event + 1, per_event):
        tokens = [rng.randrange(128_000) for _ in range(PAGE_SIZE * per_event)]
        events.append({
            "type": "BlockStored", "block_hashes": hashes[start : start + per_event], "parent_block_hash": 1,
            "token_ids": tokens, "block_size": PAGE_SIZE, "lora_id": None, "medium": "GPU",
        })  # fmt: skip
    size = _SMALL_EVENTS if per_event == 1 else 1
    return [msgspec.msgpack.encode([0.0, events[i : i + size], 0]) for i in range(0, len(events), size)]


def _ingest_us(payloads: list[bytes], num_blocks: int) -> float:
    ingest = EventIngest(min_blocks=num_blocks)  # as the router reserves room from what workers report
    source = _sources()[0]
    ingest.add(source)
    ingest.replayed(source, [], now_s=0.0)
    batches = [SeqPayload(seq, payload) for seq, payload in enumerate(payloads)]
    started = time.perf_counter()
    for batch in batches:
        ingest.live(source, batch, now_s=0.0)
    taken = time.perf_counter() - started
    return round(taken / ingest.index.num_blocks(source) * 1e6, 3)


def _plain_ingest_us(payloads: list[bytes]) -> float:
    """The same with the generic decoder, and a dict of sets."""
    index: dict[int, set[int]] = {}
    started = time.perf_counter()
    for payload in payloads:
        for event in msgspec.msgpack.decode(payload)[1]:
            for block in event["block_hashes"]:
                index.setdefault(block, set()).add(0)
    return round((time.perf_counter() - started) / len(index) * 1e6, 3)


def _filled(hashes: list[int]) -> tuple[EventIngest, float]:
    ingest = EventIngest(min_blocks=len(hashes))
    each = len(hashes) // NUM_WORKERS
    for i, source in enumerate(_sources()):
        ingest.add(source)
        keys: Hashes = as_keys(hashes[i * each : (i + 1) * each])
        ingest.index.restore(source, {Tier.GPU: keys})
    return ingest, ingest.index.size_bytes / len(hashes)


def _plain_filled(hashes: list[int]) -> tuple[dict[int, set[int]], float]:
    each = len(hashes) // NUM_WORKERS
    tracemalloc.start()
    index = {block: {min(i // each, NUM_WORKERS - 1)} for i, block in enumerate(hashes)}
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return index, size / len(hashes)


def _matching(ingest: EventIngest, prompts: Sequence[list[int]]) -> Callable[[], object]:
    """A call of it matches the next prompt; hashes come as the prompt hasher gives them."""
    keys = iter([as_keys(prompt) for prompt in prompts])
    return lambda: ingest.index.match([next(keys)], range(NUM_WORKERS))


def _plain_matching(index: dict[int, set[int]], prompts: Sequence[list[int]]) -> Callable[[], object]:
    left = iter(prompts)
    return lambda: _plain_match(index, next(left))


def _plain_match(index: dict[int, set[int]], prompt: list[int]) -> dict[int, int]:
    alive = set(range(NUM_WORKERS))
    depth = dict.fromkeys(alive, 0)
    for i, block in enumerate(prompt):
        alive &= index.get(block, set())
        if not alive:
            break
        for worker in alive:
            depth[worker] = i + 1
    return depth
