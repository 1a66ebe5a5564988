"""Small traces, and fleets that play them: what the tests of deployment/simulate have in common."""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

from actors.engine.emulated.profiles import PROFILES, Profile
from deployment.simulate.fleet import FleetSettings, Flight, Policy, Simulation
from deployment.simulate.policies import PLAIN
from deployment.simulate.routed import Routed
from deployment.simulate.trace import Call, Trace

PAGE: Final = 64
"""Tokens a page."""
PROFILE: Final = msgspec.structs.replace(PROFILES["a100-llama-8b"], chunk_tokens=1024)
"""Prompts of more than 16 pages are computed in several steps."""
POLICIES: Final[dict[str, Callable[[Simulation, int], Policy]]] = {**PLAIN, "ours": Routed}


def call(
    at_s: float, pages: Iterable[int], *, session: int = 0, adapter: str | None = None, tail: int = 7, output: int = 8
) -> Call:
    """A call whose prompt has `tail` tokens beyond its full pages."""
    ids = tuple(pages)
    return Call(at_s, ids, len(ids) * PAGE + tail, output, session, adapter)


def chats(
    num_calls: int,
    *,
    gap_s: float,
    seed: int = 0,
    adapters: int = 3,
    system_pages: int = 4,
    again: float = 0.7,
    max_output: int = 60,
) -> Trace:
    """Conversations that begin alike and grow by one to six pages a turn; Poisson arrivals, `gap_s` between calls.

    A page's id is never reused, so it stands for all of the prompt up to it. `again` is the share of later turns.
    """
    rng = random.Random(seed)
    ids = count()
    system = [next(ids) for _ in range(system_pages)]
    prompts: list[list[int]] = []
    calls: list[Call] = []
    at_s = 0.0
    for _ in range(num_calls):
        at_s += rng.expovariate(1 / gap_s)
        if not prompts or rng.random() >= again:
            prompts.append(list(system))
        session = rng.randrange(len(prompts)) if len(prompts[-1]) > system_pages else len(prompts) - 1
        prompts[session] += [next(ids) for _ in range(rng.randint(1, 6))]
        adapter = f"adapter-{session % adapters}" if adapters else None
        output, tail = rng.randint(1, max_output), rng.randrange(PAGE)
        calls.append(call(at_s, prompts[session], session=session, adapter=adapter, tail=tail, output=output))
    return Trace(calls, PAGE)


def one_at_a_time(trace: Trace, *, gap_s: float, begin_s: float = 0.0) -> Trace:
    """The same calls, `gap_s` apart."""
    return Trace([replace(c, at_s=begin_s + i * gap_s) for i, c in enumerate(trace.calls)], trace.page_size)


def settings(*, profile: Profile = PROFILE, num_workers: int = 4, **others: Any) -> FleetSettings:
    """Of a small fleet whose caches hold a small part of a trace."""
    return FleetSettings(profile=profile, num_workers=num_workers, **{"num_slots": 3, "kv_tokens": 20_000, **others})


def play_out(
    trace: Trace, fleet: FleetSettings, policy: str = "ours", *, seed: int = 0, reload_s: float | None = None
) -> Simulation:
    """A finished run; our policy's state is checked."""
    sim = Simulation(trace, fleet, reload_s=reload_s)
    made = POLICIES[policy](sim, seed)
    sim.run(made)
    if isinstance(made, Routed):
        made.core.check()
    return sim


@dataclass(slots=True)
class Watched:
    """A policy, and a log of what it was asked and told."""

    policy: Policy
    #: by flight: (time, worker) of each attempt
    attempts: dict[int, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    #: by flight: how often it was said to have ended, well or not
    ends: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))
    firsts: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    #: (time, worker, whether it died or came back)
    lives: list[tuple[float, int, str]] = field(default_factory=list)

    def choose(self, flight: Flight, now_s: float, alive: Sequence[int]) -> int:
        worker = self.policy.choose(flight, now_s, alive)
        assert worker in alive
        self.attempts[id(flight)].append((now_s, worker))
        return worker

    def first_token(self, flight: Flight, now_s: float) -> None:
        self.firsts[id(flight)] += 1
        self.policy.first_token(flight, now_s)

    def ended(self, flight: Flight, now_s: float) -> None:
        self.ends[id(flight)].append(flight.ended_s is not None)
        self.policy.ended(flight, now_s)

    def died(self, worker: int, now_s: float) -> None:
        self.lives.append((now_s, worker, "died"))
        self.policy.died(worker, now_s)

    def returned(self, worker: int, now_s: float) -> None:
        self.lives.append((now_s, worker, "returned"))
        self.policy.returned(worker, now_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines, packed where the name ends in gz."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
