"""What a simulation came to."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from deployment.simulate.fleet import Simulation


def figures(sim: Simulation) -> dict[str, Any]:
    """Figures of a finished run, JSON values; times in milliseconds from arrival at the router."""
    ended = [flight for flight in sim.flights if flight.ended_s is not None]
    times_ms = np.array(ttft_ms(sim))
    span_s = max(f.ended_s or 0.0 for f in ended) - ended[0].call.at_s
    prompt_tokens = sum(f.call.num_tokens for f in ended)
    cached_tokens = sum(f.job.cached for f in ended if f.job is not None)
    busy_s = [worker.busy_s + worker.model.busy_s for worker in sim.workers]
    predicted = [f for f in ended if f.predicted is not None and f.job is not None]
    p50, p90, p99 = np.percentile(times_ms, [50, 90, 99]).tolist()
    return {
        "requests": len(ended),
        "span_s": round(span_s, 1),
        "ttft_ms": {"mean": _ms(times_ms.mean()), "p50": _ms(p50), "p90": _ms(p90), "p99": _ms(p99)},
        "requests_per_s": round(len(ended) / span_s, 3),
        "output_tokens_per_s": round(sum(f.call.num_output for f in ended) / span_s, 1),
        "token_hit_rate": round(cached_tokens / prompt_tokens, 4),
        "computed_tokens": prompt_tokens - cached_tokens,
        "busiest_to_mean": round(max(busy_s) / max(1e-9, sum(busy_s) / len(busy_s)), 3),
        "utilization": round(sum(busy_s) / len(busy_s) / span_s, 3),
        "swaps": sum(worker.swaps + worker.model.swaps for worker in sim.workers),
        "retries": sum(f.retries for f in ended),
        "exact_predictions": round(sum(f.predicted == f.job.cached for f in predicted if f.job) / len(predicted), 4)
        if predicted
        else None,
    }


def ttft_ms(sim: Simulation) -> list[float]:
    """Of every finished call, from its arrival at the router."""
    return [((f.first_s or 0.0) - f.call.at_s) * 1000 for f in sim.flights if f.ended_s is not None]


def ideal_hit_rate(sim: Simulation) -> float:
    """Share of prompt tokens that one cache without end would have had, reloads apart.

    Engines compute each prompt's last token, and its page where it ends one.
    """
    seen: set[tuple[str | None, int]] = set()
    cached = total = 0
    for flight in sim.flights:
        total += flight.call.num_tokens
        keys = [(flight.call.adapter, page) for page in flight.call.pages]
        known = list(itertools.takewhile(seen.__contains__, keys))
        cached += sim.page_size * min(len(known), (flight.call.num_tokens - 1) // sim.page_size)
        seen.update(keys)
    return round(cached / total, 4)


def _ms(value: float) -> float:
    return round(float(value), 1)
