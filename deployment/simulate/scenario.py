"""One scenario: a trace as it is played, a fleet, a policy. Runs it and gives its figures."""

from __future__ import annotations

from typing import Any, Final

from deployment.simulate.fleet import FleetSettings, Simulation
from deployment.simulate.policies import PLAIN
from deployment.simulate.report import figures
from deployment.simulate.routed import Routed
from deployment.simulate.trace import Trace

OURS: Final = "ours"
POLICIES: Final = (OURS, *PLAIN)


def check_policies(names: list[str]) -> list[str]:
    """`all`, or names of policies. Raises ValueError that lists them."""
    if names == ["all"]:
        return list(POLICIES)
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise ValueError(f"no policy {', '.join(unknown) or 'given'}; there are {', '.join(POLICIES)}, or all")
    return names


def simulate(
    trace: Trace, fleet: FleetSettings, policy: str, *, reload_s: float | None = None
) -> tuple[dict[str, Any], Simulation]:
    """Play the trace; returns figures (report.figures) and the finished simulation."""
    sim = Simulation(trace, fleet, reload_s=reload_s)
    sim.run(Routed(sim, fleet.seed) if policy == OURS else PLAIN[policy](sim, fleet.seed))
    return figures(sim), sim
