"""A live fleet of emulated workers, loaded beyond saturation while workers die: prints JSON.

    python -m tests.bench.saturation [--config FILE] [--seconds 300] [--peak REQUESTS_PER_S]

Starts a Ray of its own and the deployment by the command line. Requests come open loop at Poisson times, in ten steps
of growing rate up to `--peak`; one engine is killed in each half minute. Then everything must be at rest, and what the
router predicts for requests one after the other must be what the engines report.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from deployment import client, local_ray
from deployment.config import Config

ROOT: Final = Path(__file__).resolve().parents[2]
STEPS: Final = 10
KILL_S: Final = 30.0
READY_S: Final = 600.0
SESSIONS: Final = 64
PREFIX_TOKENS: Final = 1536
NEW_TOKENS: Final = (64, 1024)
OUTPUT_TOKENS: Final = (16, 96)
PROBES: Final = 40
AUDITS: Final = 5
"""Attempts: an audit that events interrupt doesn't conclude."""


@dataclass
class Step:
    """One rate."""

    rate: float
    statuses: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        ordered = sorted(self.ttft_s) or [0.0]
        share = {q: round(ordered[int((len(ordered) - 1) * q / 100)] * 1000, 1) for q in (50, 90, 99)}
        return {"rate_per_s": round(self.rate, 1), "statuses": dict(self.statuses), "ttft_ms": share}


class Load:
    """The client."""

    def __init__(self, url: str, config: Config, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session
        self._rng = random.Random(1)
        self._models = [config.model.served_name, *config.lora.adapters]
        self._prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(SESSIONS)]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 250) for _ in range(count)]

    def body(self) -> dict[str, Any]:
        """A request: one of the sessions, which stays with its adapter."""
        which = self._rng.randrange(SESSIONS)
        return {
            "model": self._models[which % len(self._models)],
            "prompt": self._prefixes[which] + self._tokens(self._rng.randint(*NEW_TOKENS)),
            "max_tokens": self._rng.randint(*OUTPUT_TOKENS),
            "stream": True,
        }

    async def play(self, step: Step, seconds: float) -> list[asyncio.Task[None]]:
        """Send at the step's rate; returns what still runs."""
        tasks = []
        at_s, end_s = time.monotonic(), time.monotonic() + seconds
        while (at_s := at_s + self._rng.expovariate(step.rate)) < end_s:
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            tasks.append(asyncio.ensure_future(self._send(step)))
        return tasks

    async def _send(self, step: Step) -> None:
        started_s = time.monotonic()
        try:
            async with self._session.post(self._url + "/v1/completions", json=self.body()) as answer:
                if answer.status != 200:
                    body = await answer.json()
                    step.statuses[f"{answer.status} {body['error']['code']}"] += 1
                    return
                first, whole = None, b""
                async for chunk in answer.content.iter_any():
                    first = first or time.monotonic() - started_s
                    whole = whole[-200:] + chunk
                broken = b'"engine_failed"' in whole
                step.statuses["200, ended with an error event" if broken else "200"] += 1
                step.ttft_s.append(first or 0.0)
        except (aiohttp.ClientError, TimeoutError) as exc:
            step.statuses[type(exc).__name__] += 1


async def measure(url: str, config: Config, *, seconds: float, peak: float, router: psutil.Process) -> dict[str, Any]:
    """Load, kill, rest, probe."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        load = Load(url, config, session)
        steps = [Step(peak * (i + 1) / STEPS) for i in range(STEPS)]
        ended = asyncio.Event()
        killing = asyncio.ensure_future(_kill(config.name, ended))
        before_s, running = _cpu_s(router), []
        for step in steps:
            running += await load.play(step, seconds / STEPS)
            print(json.dumps(step.figures()), file=sys.stderr)
        await asyncio.gather(*running)
        router_s = _cpu_s(router) - before_s
        ended.set()
        killed = await killing
        rest = await _rest(session, url, config.workers.count)
        exact, probes = await _probe(session, url, load)
        metrics = await (await session.get(url + "/metrics")).text()
    requests = sum(step.statuses.total() for step in steps)
    ttft_s = [s for step in steps for s in step.ttft_s]
    return {
        "workers": config.workers.count,
        "seconds": seconds,
        "requests": requests,
        "killed": killed,
        "statuses": dict(sum((step.statuses for step in steps), Counter())),
        "steps": [step.figures() for step in steps],
        "router_cpu_ms_per_request": round(router_s / requests * 1000, 3),
        "added_ms_mean": round((sum(ttft_s) / len(ttft_s) - _mean_s(metrics, "loray_ttft_seconds")) * 1000, 2),
        "queue_wait_ms_mean_of_those_who_waited": round(_mean_s(metrics, "loray_queue_wait_seconds") * 1000, 1),
        "predictions_under_load": _predictions(metrics),
        "at_rest": rest,
        "sequential_probes_exact": f"{exact} of {probes}",
    }


async def _kill(name: str, ended: asyncio.Event) -> list[str]:
    """One engine in each half minute."""
    rng, killed = random.Random(2), []
    while True:
        try:
            async with asyncio.timeout(KILL_S):
                await ended.wait()
            return killed
        except TimeoutError:
            status = await asyncio.to_thread(client.status, name)
            worker = rng.choice([w for w in status["workers"] if w["state"] == "ready"])
            os.kill(worker["engine_pid"], signal.SIGKILL)
            killed.append(worker["id"])


async def _rest(session: aiohttp.ClientSession, url: str, count: int) -> dict[str, Any]:
    """Wait until all workers are exact again, and tell what is still booked."""
    until_s = time.monotonic() + READY_S
    while True:
        status = await (await session.get(url + "/loray/status")).json()
        ranks = [rank for worker in status["workers"].values() for rank in worker["ranks"]]
        if len(ranks) == count and all(rank["state"] == "exact" for rank in ranks):
            break
        if time.monotonic() > until_s:
            raise RuntimeError("the fleet isn't whole again")
        await asyncio.sleep(1.0)
    audits, audit = 0, {"clean": False}
    while not audit["clean"] and audits < AUDITS:
        audit = await (await session.post(url + "/loray/audit")).json()
        audits += 1
    names = ("in_flight", "queued_prefill_tokens", "booked_kv_tokens", "running_adapters")
    return {
        **{name: sum(rank[name] for rank in ranks) for name in names},
        "queued": status["queued"],
        "audit_clean_at_attempt": audits if audit["clean"] else None,
        "audit_not_clean": [f"{one['worker']}: {one['why']}" for one in audit["sources"] if one["verdict"] != "clean"],
    }


async def _probe(session: aiohttp.ClientSession, url: str, load: Load) -> tuple[int, int]:
    exact = 0
    for _ in range(PROBES):
        body = {**load.body(), "stream": False, "max_tokens": 1}
        async with session.post(url + "/v1/completions", json=body) as answer:
            said = (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
            exact += int(answer.headers["x-loray-predicted-cached-tokens"]) == said
    return exact, PROBES


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _mean_s(metrics: str, name: str) -> float:
    total = sum(float(v) for v in re.findall(rf"^{name}_sum(?:{{.*}})? (\S+)$", metrics, re.M))
    count = sum(float(v) for v in re.findall(rf"^{name}_count(?:{{.*}})? (\S+)$", metrics, re.M))
    return total / count if count else 0.0


def _predictions(metrics: str) -> dict[str, int]:
    found = re.findall(r'^loray_predictions_total\{outcome="(\w+)"\} (\S+)$', metrics, re.M)
    return {outcome: int(float(value)) for outcome, value in found}


def _router_process() -> psutil.Process:
    """The actor that listens: Ray names its process after it."""
    for process in psutil.process_iter(["cmdline"]):
        if any("RouterActor" in part for part in process.info["cmdline"] or ()):
            return process
    raise RuntimeError("no router process")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "emulated-32.yaml")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--peak", type=float, default=120.0)
    given = parser.parse_args()
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints there
    config = Config.load(given.config)
    url = f"http://{config.router.host}:{config.router.port}"
    with tempfile.TemporaryDirectory() as folder:
        ray = local_ray.start(Path(folder))
        os.environ.update(ray.environment())
        up = subprocess.Popen(
            [sys.executable, "-m", "deployment", "up", str(given.config)], cwd=ROOT, stdout=sys.stderr
        )
        try:
            until_s = time.monotonic() + READY_S
            while True:
                try:
                    if client.status(config.name)["state"] == "ready":
                        break
                except client.NotRunningError:
                    pass
                if up.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError("the deployment doesn't come up")
                time.sleep(1.0)
            found = asyncio.run(measure(url, config, seconds=given.seconds, peak=given.peak, router=_router_process()))
            print(json.dumps(found, indent=2), file=stdout, flush=True)
        finally:
            up.terminate()
            up.wait(60)
            ray.stop()


if __name__ == "__main__":
    main()
