"""`status [--json]` and `route`: looking inside a running deployment."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from deployment import client


def run(arguments: argparse.Namespace) -> int:
    """Show workers, router and table."""
    found = client.status(arguments.name)
    print(json.dumps(found, indent=2) if arguments.json else _text(found))
    return 0


def route(arguments: argparse.Namespace) -> int:
    """Explain where a request would go, without running it."""
    url = arguments.url or client.status(arguments.name)["router"]["url"]
    body: dict[str, Any] = {"model": arguments.model}
    if arguments.messages:
        body["messages"] = json.loads(Path(arguments.messages).read_text())
    else:
        body["prompt"] = arguments.prompt
    found = client.post(f"{url}/loray/route", body, api_key=arguments.api_key)
    print(json.dumps(found, indent=2) if arguments.json else _explanation(found))
    return 0


def _text(found: dict[str, Any]) -> str:
    router = found["router"].get("url", "no router")
    lines = [
        f"{found['name']}: {found['state']}, model {found['model']}, {router}, up {found['uptime_s']:.0f} s",
        f"{'worker':7} {'state':9} {'incarnation':13} {'node':9} {'gpus':6} {'ranks':10} {'sync':10} "
        f"{'blocks':>8} {'running':>8}  adapters",
    ]
    for worker in found["workers"]:
        ranks = worker.get("dp_ranks") or []
        gpus = ",".join(map(str, worker.get("gpus", []))) or "-"
        sync = ",".join(sorted({rank["state"] for rank in worker["ranks"]})) or "-"
        adapters = ", ".join(f"{k} ({v})" for k, v in worker.get("adapters", {}).items()) or "-"
        lines.append(
            f"{worker['id']:7} {worker['state']:9} {worker.get('incarnation', '-'):13} {worker.get('node', '-')[:8]:9} "
            f"{gpus:6} {','.join(map(str, ranks)) or '-':10} {sync:10} {worker.get('cached_blocks', 0):8} "
            f"{worker['in_flight']:8}  {adapters}"
        )
        lines += [
            f"        rank {rank['dp_rank']} is {rank['state']}: {rank['fault']}"
            for rank in worker["ranks"]
            if rank["fault"]
        ]
        if worker.get("last_error"):
            lines.append(f"        last error: {worker['last_error'].splitlines()[0]}")
    table = found["table"]
    lines.append(f"table: version {table.get('version', '-')}, adapters {', '.join(table.get('adapters', [])) or '-'}")
    return "\n".join(lines)


def _explanation(found: dict[str, Any]) -> str:
    cached = found["predicted_cached_tokens"]
    lines = [
        f"{found['model']} -> {found['worker']} (dp_rank {found['dp_rank']}): {found['reason']}, "
        f"{'unknown' if cached is None else cached} of {found['prompt_tokens']} tokens cached",
        f"{'worker':7} {'rank':>4} {'state':10} {'cached':>7} {'cost ms':>9}  terms",
    ]
    for candidate in found["candidates"]:
        known = candidate["predicted_cached_tokens"]
        terms = ", ".join(f"{name} {value:g}" for name, value in candidate["terms_ms"].items())
        lines.append(
            f"{candidate['worker']:7} {candidate['dp_rank']:4} {candidate['state']:10} "
            f"{'?' if known is None else known:>7} {candidate['cost_ms']:9.1f}  {terms}"
        )
    return "\n".join(lines)
