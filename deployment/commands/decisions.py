"""`decisions`: what the router chose lately and why, term by term; or whether a log would be decided alike now."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from deployment import client
from router.choice import replay
from router.net.decision_log import read_log


def run(arguments: argparse.Namespace) -> int:
    """0; 1 where a replayed log has decisions that would be others now."""
    if arguments.replay:
        return _replay(Path(arguments.replay), as_json=arguments.json)
    url = arguments.url or client.status(arguments.name)["router"]["url"]
    found = client.get(f"{url}/loray/decisions", api_key=arguments.api_key)
    latest = found["decisions"][-arguments.last :]
    print(json.dumps({**found, "decisions": latest}) if arguments.json else "\n".join(map(_line, latest)))
    return 0


def _replay(path: Path, *, as_json: bool) -> int:
    head, log = read_log(path)
    others = replay(log, seed=head.seed)
    if as_json:
        print(json.dumps({"decisions": len(log), "others": others}))
    else:
        print(f"{len(log)} decisions of router {head.router}: {len(others)} would be others now {others[:20] or ''}")
    return 1 if others else 0


def _line(entry: dict[str, Any]) -> str:
    """One decision: the chosen candidate, and the cheapest other."""
    candidates = entry["candidates"]
    chosen = candidates[entry["chosen"]]
    others = sorted((sum(c["terms_ms"].values()), c["worker"]) for c in candidates if c is not chosen)
    other = f"; next {others[0][1]} {others[0][0]:.1f} ms" if others else ""
    terms = " + ".join(f"{name} {ms:.1f}" for name, ms in chosen["terms_ms"].items()) or "nothing"
    what = f"{entry['adapter'] or 'base'}, {entry['prompt_tokens']} tokens"
    return f"#{entry['number']} {what} -> {chosen['worker']}/{chosen['dp_rank']} ({entry['reason']}): {terms}{other}"
