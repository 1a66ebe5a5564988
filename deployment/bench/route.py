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


def run(*, quick: bool) -> dict[str, Any]:
    """All figures. `quick` is for a smoke test, its figures mean nothing."""
    rng = random.Random(0)
    rounds = 50 if quick else 1000
    tokens = [rng.randrange(128_000) for _ in range(max(LENGTHS) * PAGE_SIZE + 8)]
    core = _core(tokens, rng)
    index = _plain_index(tokens)
    figures: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    cold: dict[str, Any] = {}
    for length in LENGTHS:
        prompt = tokens[: length * PAGE_SIZE + 8]
        request = RouteRequest(packed_tokens=pack_tokens(prompt))
        figures[str(length)] = percentiles_us(lambda r=request: core.route(r), rounds=rounds)  # type: ignore[misc]
        plain[str(length)] = percentiles_us(_plain_route(prompt, index), rounds=max(20, rounds // 10))
        cold[str(length)] = percentiles_us(_cold_route(core, prompt, rng), rounds=max(20, rounds // 10))
    return {**figures, "nobody_holds_it": cold, "plain": plain, "workers": NUM_WORKERS}


def _core(tokens: list[int], rng: random.Random) -> RouterCore:
    """Eight workers; worker i holds the first (i + 1) eighths of the prompt, and much else."""
    core = RouterCore(CostWeights(), rng=random.Random(0), min_blocks=1_000_000)
    for i in range(NUM_WORKERS):
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
            held = block_hashes(tokens[: len(tokens) * (i + 1) // NUM_WORKERS], PAGE_SIZE, Namespace())
            other = [rng.getrandbits(64) for _ in range(100_000)]
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
