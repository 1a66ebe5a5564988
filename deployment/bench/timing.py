"""Timing a function many times; percentiles, because means hide what users feel."""

from __future__ import annotations

import time
from collections.abc import Callable


def percentiles_us(work: Callable[[], object], *, rounds: int, warmup: int = 20) -> dict[str, float]:
    """p50 and p99 of one call, in microseconds."""
    for _ in range(warmup):
        work()
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    taken.sort()
    return {
        "p50_us": round(taken[len(taken) // 2] * 1e6, 2),
        "p99_us": round(taken[int(len(taken) * 0.99)] * 1e6, 2),
    }
