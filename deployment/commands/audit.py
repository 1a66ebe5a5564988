"""`audit`: whether the router's index is what the workers' mirrors hold, and the mirrors what the engines do."""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

from deployment import client

_TIMEOUT_S: Final = 600.0


def run(arguments: argparse.Namespace) -> int:
    """Audit every source now; exit status 1 unless all are clean."""
    url = arguments.url or client.status(arguments.name)["router"]["url"]
    found = client.post(f"{url}/loray/audit", {}, api_key=arguments.api_key, timeout_s=_TIMEOUT_S)
    print(json.dumps(found, indent=2) if arguments.json else _text(found))
    return 0 if found["clean"] else 1


def _text(found: dict[str, Any]) -> str:
    lines = [f"{'worker':7} {'rank':>4} {'verdict':13} {'seq':>8} {'blocks':>9} {'ghosts':>7} {'missing':>8}  probes"]
    for source in found["sources"]:
        probes = source["probes"]
        exact = sum(probe["predicted"] == probe["actual"] for probe in probes)
        lines.append(
            f"{source['worker']:7} {source['dp_rank']:4} {source['verdict']:13} {source['seq'] or '-':>8} "
            f"{source['blocks']:9} {source['ghosts']:7} {source['missing']:8}  {exact} of {len(probes)} exact"
        )
        if source["why"]:
            lines.append(f"        {source['why']}")
        lines += [
            f"        a prompt of {p['tokens']} tokens: {p['predicted']} predicted, {p['actual']} cached"
            for p in probes
            if p["predicted"] != p["actual"]
        ]
    return "\n".join([*lines, "clean" if found["clean"] else "NOT clean"])
