"""`simulate TRACE`: how would this traffic fare, with that many workers, under this policy or another?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from actors.engine.emulated.profiles import profile_of
from deployment.simulate.fleet import FleetSettings, FleetTooSmallError
from deployment.simulate.plot import plot_ttft
from deployment.simulate.report import ideal_hit_rate, ttft_ms
from deployment.simulate.scenario import check_policies, simulate
from deployment.simulate.trace import read_trace
from deployment.simulate.workload import Traffic, play

_COLUMNS = ("workers", "policy", "ttft p50", "p90", "p99 ms", "hit rate", "req/s", "out tok/s", "busiest/mean", "swaps")


def run(arguments: argparse.Namespace) -> int:
    """0; 1 where a target was asked for and no size keeps it, or where none serves the traffic at all."""
    policies = check_policies([name for name in arguments.policy.split(",") if name])
    sizes = _sizes(arguments.workers)
    traffic = Traffic(
        adapters=arguments.adapters,
        popularity=arguments.popularity,
        rate=arguments.rate,
        burstiness=arguments.burstiness,
        max_calls=arguments.calls,
        reload_s=arguments.reload_every,
    )
    trace = play(
        read_trace(Path(arguments.trace), scale=arguments.scale, seed=arguments.seed), traffic, seed=arguments.seed
    )
    rows: list[dict[str, Any]] = []
    times: dict[str, list[float]] = {}
    ideal = 0.0
    for size in sizes:
        for policy in policies:
            try:
                found, sim = simulate(trace, _fleet(arguments, size), policy, reload_s=traffic.reload_s)
            except FleetTooSmallError as exc:
                print(f"{size} workers under {policy}: {exc}", file=sys.stderr)
                continue
            rows.append({"workers": size, "policy": policy, **found})
            times[f"{policy}, {size} workers"] = ttft_ms(sim)
            ideal = ideal_hit_rate(sim)
    if not rows:
        return 1
    enough = _enough(rows, policies[0], arguments.target_ms)
    if arguments.plot:
        plot_ttft(times, Path(arguments.plot), title=f"{Path(arguments.trace).name}, {arguments.adapters} adapters")
    if arguments.json:
        answer = {"calls": len(trace.calls), "span_s": trace.span_s, "ideal_token_hit_rate": ideal, "runs": rows}
        print(json.dumps(answer if arguments.target_ms is None else {**answer, "workers_needed": enough}))
    else:
        print(f"{len(trace.calls)} requests over {trace.span_s:.0f} s; ideal hit rate {ideal:.3f}\n{_table(rows)}")
        if arguments.target_ms is not None:
            verdict = f"{enough} workers are enough" if enough else f"none of {sizes} workers is enough"
            print(f"{verdict} for p90 within {arguments.target_ms:g} ms under {policies[0]}")
    return 0 if arguments.target_ms is None or enough else 1


def _fleet(arguments: argparse.Namespace, size: int) -> FleetSettings:
    return FleetSettings(
        profile=profile_of(arguments.profile),
        num_workers=size,
        num_slots=arguments.slots,
        kv_tokens=arguments.kv_tokens,
        event_delay_s=arguments.event_delay_ms / 1000,
        event_loss=arguments.event_loss,
        fail_every_s=arguments.fail_every,
        fail_for_s=arguments.fail_for,
        seed=arguments.seed,
    )


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) > 1024:
        raise ValueError(f"--workers must be numbers from 1 to 1024, like 16 or 4,8,16; got {text!r}")
    return sizes


def _enough(rows: list[dict[str, Any]], policy: str, target_ms: float | None) -> int | None:
    """The least size whose p90 is within the target."""
    fitting = [r["workers"] for r in rows if r["policy"] == policy and r["ttft_ms"]["p90"] <= (target_ms or 0.0)]
    return min(fitting, default=None)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [_COLUMNS]
    for row in rows:
        ttft = row["ttft_ms"]
        lines.append((
            str(row["workers"]), row["policy"], f"{ttft['p50']:.0f}", f"{ttft['p90']:.0f}", f"{ttft['p99']:.0f}",
            f"{row['token_hit_rate']:.3f}", f"{row['requests_per_s']:.2f}", f"{row['output_tokens_per_s']:.0f}",
            f"{row['busiest_to_mean']:.2f}", str(row["swaps"]),
        ))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)
