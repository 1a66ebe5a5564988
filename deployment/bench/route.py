"""`bench route`: a whole decision from packed token ids, warm, beside one by a dict and plain hashing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from deployment.bench.index import NUM_WORKERS, PAGE_SIZE
from deployment.bench.timing import percentiles_us
from router.core import RouterCore
from router.cost import CostWeights
from router.decision import RouteRequest
from router.effects import Subscribe
from router.events import Tier
from router.hashing import Namespace, block_hashes, pack_tokens
from router.ids import DpRank, Incarnation, WorkerId
from router.reports import RankReport, WorkerReport, WorkerState
from router.table import as_keys

LENGTHS: Final = (64, 256, 1024)
"""Blocks of a prompt."""
MANY_WORKERS: Final = 512


def run(*, quick: bool) -> dict[str, Any]:
    """All figures. `quick` is for a smoke test, its figures mean nothing."""
    rng = random.Random(0)
    rounds = 50 if quick else 1000
    tokens = [rng.randrange(128_000) for _ in range(max(LENGTHS) * PAGE_SIZE + 8)]
    core = _core(tokens, rng)
    large = _core(tokens, rng, num_workers=MANY_WORKERS, num_other=1000)
    index = _plain_index(tokens)
    figures: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    cold: dict[str, Any] = {}
    many: dict[str, Any] = {}
    for length in LENGTHS:
        prompt = tokens[: length * PAGE_SIZE + 8]
        request = RouteRequest(packed_tokens=pack_tokens(prompt))
        figures[str(length)] = percentiles_us(lambda r=request: core.route(r), rounds=rounds)  # type: ignore[misc]
        many[str(length)] = percentiles_us(lambda r=request: large.route(r), rounds=max(20, rounds // 3))  # type: ignore[misc]
        plain[str(length)] = percentiles_us(_plain_route(prompt, index), rounds=max(20, rounds // 10))
        cold[str(length)] = percentiles_us(_cold_route(core, prompt, rng), rounds=max(20, rounds // 10))
    return {
        **figures,
        "nobody_holds_it": cold,
        f"of_{MANY_WORKERS}_workers": many,
        "plain": plain,
        "workers": NUM_WORKERS,
    }


def _core(
    tokens: list[int], rng: random.Random, *, num_workers: int = NUM_WORKERS, num_other: int = 100_000
) -> RouterCore:
    """Of n workers, worker i holds the first (i + 1) n-ths of the prompt, and so many other blocks."""
    core = RouterCore(CostWeights(), rng=random.Random(0), min_blocks=1_000_000)
    all_held = block_hashes(tokens, PAGE_SIZE, Namespace())
    for i in range(num_workers):
        report = WorkerReport(
            worker_id=WorkerId(f"w{i}"),
            incarnation=Incarnation("bench"),
            state=WorkerState.READY,
            ranks=(RankReport(dp_rank=DpRank(i), endpoint="none"),),
            page_size=PAGE_SIZE,
            max_loras_per_batch=8,
        )
        for effect in core.report(report):
            assert isinstance(effect, Subscribe)
            held = all_held[: len(all_held) * (i + 1) // num_workers]
            other = [rng.getrandbits(64) for _ in range(num_other)]
            core.ingest.replayed(effect.source, [], now_s=0.0)
            core.ingest.index.restore(effect.source, {Tier.GPU: as_keys(held + other)})
    return core


def _cold_route(core: RouterCore, prompt: list[int], rng: random.Random) -> Callable[[], object]:
    """Every prompt differs from its first token on: nobody holds any of it, nothing is remembered."""
    packed = pack_tokens(prompt)

    def route() -> object:
        return core.route(RouteRequest(packed_tokens=pack_tokens([rng.randrange(128_000)]) + packed[4:]))

    return route


def _plain_index(tokens: list[int]) -> dict[int, set[int]]:
    held = block_hashes(tokens, PAGE_SIZE, Namespace())
    return {
        block: {w for w in range(NUM_WORKERS) if i < len(held) * (w + 1) // NUM_WORKERS} for i, block in enumerate(held)
    }


def _plain_route(prompt: list[int], index: dict[int, set[int]]) -> Callable[[], object]:
    """Hash all pages, walk a dict of sets, take the worker with most."""

    def route() -> object:
        depth = [0] * NUM_WORKERS
        alive = set(range(NUM_WORKERS))
        for i, block in enumerate(block_hashes(prompt, PAGE_SIZE, Namespace())):
            alive &= index.get(block, set())
            for worker in alive:
                depth[worker] = i + 1
        return max(range(NUM_WORKERS), key=depth.__getitem__)

    return route
