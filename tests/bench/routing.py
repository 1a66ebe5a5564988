"""The results table of routing: three traces, adapters and load, all policies; JSON, or the table of RESULTS.md.

    python -m tests.bench.routing FOLDER_OF_TRACES [--json] [--calls N] [--jobs N] [--only TEXT]

The folder holds traces/ and lora/ as the traces' publishers name them. Saturation of a trace and its adapters is the
best throughput of any policy but the oracle when all calls come eight times too fast, measured until nine tenths are
done. Everything else is the same in all cells: 16 workers of profile a100-llama-8b, 8 slots, weights as shipped; with
32 and more adapters, each gets other weights under its name every ten minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

from actors.engine.emulated.profiles import profile_of
from deployment.simulate.fleet import FleetSettings
from deployment.simulate.report import ideal_hit_rate
from deployment.simulate.scenario import POLICIES, simulate
from deployment.simulate.trace import Trace, read_trace
from deployment.simulate.workload import Traffic, play

TRACES: Final = {
    "conversation": ("mooncake_conversation.jsonl", 1.0),
    "synthetic": ("mooncake_synthetic.jsonl", 1.0),
    "agentic": ("agentic_sessions.jsonl.gz", 1 / 8),
}
ADAPTERS: Final = {"1": (1, "uniform"), "32": (32, "zipf:0.9"), "100": (100, "zipf:0.9"), "drifting": (100, "drift")}
LOADS: Final = (0.5, 0.8, 0.95)
RELOAD_S: Final = 600.0
MANY: Final = 32
NUM_WORKERS: Final = 16
OVERLOAD: Final = 8.0
CONTENDERS: Final = ("ours", "name_keyed", "least_loaded")
"""Policies that saturation is sought among; the others never come near."""
SEED: Final = 1


class Cell(NamedTuple):
    """One row of the table."""

    trace: str
    adapters: str
    load: float
    policy: str


@cache
def _trace(folder: Path, name: str) -> Trace:
    file, scale = TRACES[name]
    return read_trace(folder / "traces" / file, scale=scale, seed=SEED)


def _run(folder: Path, calls: int, cell: Cell, rate: float) -> dict[str, Any]:
    num, law = ADAPTERS[cell.adapters]
    if law == "drift":
        law = f"drift:{folder / 'lora' / 'client_hourly_rates.csv.gz'}"
    traffic = Traffic(adapters=num, popularity=law, rate=rate, max_calls=calls)
    trace = play(_trace(folder, cell.trace), traffic, seed=SEED)
    fleet = FleetSettings(profile=profile_of("a100-llama-8b"), num_workers=NUM_WORKERS, seed=SEED)
    found, sim = simulate(trace, fleet, cell.policy, reload_s=RELOAD_S if num >= MANY else None)
    ended_s = sorted(flight.ended_s or 0.0 for flight in sim.flights)
    at = int(len(ended_s) * 0.9)
    return {
        **cell._asdict(),
        **found,
        "ideal_hit_rate": ideal_hit_rate(sim),
        "offered_per_s": round(len(trace.calls) / max(trace.span_s, 1e-9), 3),
        "throughput_per_s": round(at / ended_s[at], 3),
    }


def _pace(folder: Path, name: str, calls: int) -> float:
    """Calls a second of the trace as it is."""
    some = _trace(folder, name).calls[:calls]
    return len(some) / (some[-1].at_s - some[0].at_s)


def measure(folder: Path, *, calls: int, jobs: int, only: str = "") -> dict[str, Any]:
    """All cells."""
    kinds = [kind for kind in product(TRACES, ADAPTERS) if only in "/".join(kind)]
    with ProcessPoolExecutor(jobs) as pool:
        heavy = [Cell(trace, adapters, OVERLOAD, policy) for trace, adapters in kinds for policy in CONTENDERS]
        tried = [pool.submit(_run, folder, calls, cell, OVERLOAD) for cell in heavy]
        best: dict[tuple[str, str], float] = {}
        for cell, one in zip(heavy, tried, strict=True):
            key = (cell.trace, cell.adapters)
            best[key] = max(best.get(key, 0.0), one.result()["throughput_per_s"])
        cells = [Cell(*kind, load, policy) for kind, load, policy in product(kinds, LOADS, POLICIES)]
        rates = [cell.load * best[cell.trace, cell.adapters] / _pace(folder, cell.trace, calls) for cell in cells]
        runs = [pool.submit(_run, folder, calls, cell, rate) for cell, rate in zip(cells, rates, strict=True)]
        rows = []
        for run in runs:
            rows.append(run.result())
            print(f"{len(rows)}/{len(runs)}", end="\r", file=sys.stderr)
    return {"calls": calls, "saturation_per_s": {"/".join(k): v for k, v in best.items()}, "rows": rows}


def table(found: dict[str, Any]) -> str:
    """Markdown: a row a cell, ours against the best of the others, name-keyed events and the oracle."""
    rows = {Cell(r["trace"], r["adapters"], r["load"], r["policy"]): r for r in found["rows"]}
    kinds = list(dict.fromkeys((c.trace, c.adapters, c.load) for c in rows))
    lines = [
        "| trace | adapters | load | ours p50 / p90 / p99 ms | best other p90 | best other p99 | name-keyed p90 / p99 "
        "| oracle p90 / p99 | hit rate ours / name-keyed / oracle / ideal | swaps ours / name-keyed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        of = {policy: rows[Cell(*kind, policy)] for policy in POLICIES}
        ours, named, oracle = of["ours"], of["name_keyed"], of["oracle"]
        others = {p: r for p, r in of.items() if p not in ("ours", "oracle")}
        cells = [
            kind[0],
            kind[1],
            f"{kind[2]:.0%}",
            " / ".join(f"{ours['ttft_ms'][q]:.0f}" for q in ("p50", "p90", "p99")),
        ]
        for q in ("p90", "p99"):
            policy = min(others, key=lambda p, q=q: others[p]["ttft_ms"][q])
            least, mine = others[policy]["ttft_ms"][q], ours["ttft_ms"][q]
            cells.append(f"{least:.0f} {policy}{'' if mine <= least else f' (ours {mine / least - 1:+.1%})'}")
        cells.append(
            " / ".join(
                f"{named['ttft_ms'][q]:.0f} ({ours['ttft_ms'][q] / named['ttft_ms'][q] - 1:+.0%})"
                for q in ("p90", "p99")
            )
        )
        cells.append(" / ".join(f"{oracle['ttft_ms'][q]:.0f}" for q in ("p90", "p99")))
        cells.append(
            " / ".join(
                f"{v:.3f}" for v in (*(r["token_hit_rate"] for r in (ours, named, oracle)), ours["ideal_hit_rate"])
            )
        )
        cells.append(f"{ours['swaps']} / {named['swaps']}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose `trace/adapters` holds the text")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(given.folder, calls=given.calls, jobs=given.jobs, only=given.only)
    print(json.dumps(found) if given.json else table(found))


if __name__ == "__main__":
    main()
