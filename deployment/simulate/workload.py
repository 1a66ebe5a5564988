"""What a trace doesn't tell: which adapter a conversation uses, how fast calls come, what is reloaded, what fails.

Popularity of n adapters, by name: `uniform`; `zipf:A`, rank^-A (MuxServe); `power:A`, adapter int(n * u^(1/A)) for u
uniform (S-LoRA; A = 1 is uniform); `drift:FILE`, rates of real clients hour by hour (ServeGen's), each hour of which is
spread over the trace. A conversation keeps its adapter for life.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
import zlib
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from deployment.simulate.trace import Trace, TraceError

_DRIFT_HOURS = 24
"""Hours of the rates that a trace passes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How a trace is played."""

    adapters: int = 0
    """0: the base model only."""
    popularity: str = "zipf:0.9"
    rate: float = 1.0
    """How many times faster calls come than in the trace."""
    burstiness: float = 1.0
    """Gaps between calls are multiplied by draws of variance burstiness^2 - 1 and mean 1; 1 leaves them as they are."""
    max_calls: int | None = None
    reload_s: float | None = None
    """Each adapter gets new weights so often, one after the other."""

    def check(self) -> None:
        """Raises ValueError that says what is allowed."""
        allowed = {
            "rate must be above 0": 0 < self.rate < math.inf,
            "burstiness at least 1": 1 <= self.burstiness < math.inf,
            "adapters at least 0": self.adapters >= 0,
            "max_calls at least 1": self.max_calls is None or self.max_calls >= 1,
            "reload_s above 0": self.reload_s is None or 0 < self.reload_s < math.inf,
        }
        if not all(allowed.values()):
            raise ValueError(f"{', '.join(allowed)}; got {self}")


def play(trace: Trace, traffic: Traffic, *, seed: int) -> Trace:
    """The trace as it is to come. Raises ValueError for what can't be played."""
    traffic.check()
    rng = random.Random(seed)
    calls = trace.calls[: traffic.max_calls]
    begin_s, span_s = calls[0].at_s, max(calls[-1].at_s - calls[0].at_s, 1e-9)
    draw = _popularity(traffic.popularity, traffic.adapters, rng) if traffic.adapters else None
    adapter_of: dict[int, str] = {}
    at_s, before_s, played = 0.0, begin_s, []
    shape = 1 / (traffic.burstiness**2 - 1) if traffic.burstiness > 1 else 0.0
    for call in calls:
        stretch = rng.gammavariate(shape, 1 / shape) if shape else 1.0
        at_s += (call.at_s - before_s) * stretch / traffic.rate
        before_s = call.at_s
        adapter = call.adapter
        if draw is not None:
            adapter = adapter_of.get(call.session)
            if adapter is None:
                adapter = adapter_of[call.session] = f"adapter-{draw((call.at_s - begin_s) / span_s):03d}"
        played.append(replace(call, at_s=at_s, adapter=adapter))
    return Trace(played, trace.page_size)


def _popularity(spec: str, num: int, rng: random.Random) -> Callable[[float], int]:
    """Draws an adapter at a share of the trace's time."""
    kind, _, value = spec.partition(":")
    if spec == "uniform":
        return lambda _share: rng.randrange(num)
    if kind == "drift" and value:
        return _weighted(_client_rates(Path(value), num), rng)
    exponent = _number(value)
    if kind == "power" and exponent > 0:
        return lambda _share: min(num - 1, int(num * rng.random() ** (1 / exponent)))
    if kind == "zipf" and exponent >= 0:
        return _weighted([[(i + 1) ** -exponent for i in range(num)]], rng)
    raise ValueError(
        f"popularity must be uniform, zipf:A with A at least 0, power:A with A above 0, or drift:FILE, got {spec!r}"
    )


def _number(text: str) -> float:
    """NaN, which no comparison holds for, unless it is finite."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _weighted(hours: list[list[float]], rng: random.Random) -> Callable[[float], int]:
    sums = [list(accumulate(weights)) for weights in hours]

    def draw(share: float) -> int:
        row = sums[min(len(sums) - 1, int(share * len(sums)))]
        return min(len(row) - 1, bisect(row, rng.random() * row[-1]))

    return draw


def _client_rates(path: Path, num: int) -> list[list[float]]:
    """Rates of `num` clients, hour by hour: the busiest day of the model with the fewest clients that suffice."""
    rates: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for row in csv.DictReader(file):
                rate, hour = float(row["rate_per_s"]), int(row["hour"])
                if not (0 <= rate < math.inf and hour >= 0):
                    raise ValueError(f"rate {rate} in hour {hour}")
                rates[row["model"]][row["client"]][hour] = rate
    except (OSError, EOFError, zlib.error, KeyError, TypeError, ValueError) as exc:
        raise TraceError(f"{path} has no client rates (model,client,hour,rate_per_s): {exc}") from exc
    if not rates:
        raise TraceError(f"{path} has no client rates (model,client,hour,rate_per_s): no lines")
    fitting = [clients for clients in rates.values() if len(clients) >= num] or [max(rates.values(), key=len)]
    clients = min(fitting, key=len)
    day = max(
        range(0, 1 + max(hour for one in clients.values() for hour in one), _DRIFT_HOURS),
        key=lambda first: sum(one.get(first + h, 0.0) for one in clients.values() for h in range(_DRIFT_HOURS)),
    )
    busiest = sorted(clients.values(), key=lambda one: -sum(one.values()))[:num]
    floor = 1e-9
    return [[one.get(day + hour, 0.0) + floor for one in busiest] for hour in range(_DRIFT_HOURS)]
